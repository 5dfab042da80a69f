import importlib.util
import math
import os
import subprocess
import sys

import pytest
import torch

from vlp.positions.anchor import anchor_distance, anchor_path

pytest.importorskip("triton")
from compiled_kernels import TOKENS, anchor_kernel, compile_kernel

from vlp.positions import anchor as windowed_path
from vlp.positions import anchor_kernels as anchor_triton

METRICS = ["euclidean", "manhattan", "chebyshev"]


@pytest.fixture(scope="module")
def interpreted():
    """A second copy of the kernels: Triton reads TRITON_INTERPRET where one is decorated."""
    spec = importlib.util.spec_from_file_location(
        "anchor_triton_interpreted", anchor_triton.__file__
    )
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        spec.loader.exec_module(module)
        patch.setattr(windowed_path, "kernels", lambda: module)
        yield windowed_path


def distances(batch, grid, tokens, groups, seed=0, threshold=0.9, dtype=torch.float32):
    """No two paths are equally long, so every minimum has one gradient."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, groups, grid[0] * grid[1], tokens)
    similarity = torch.rand(shape, generator=generator, dtype=torch.float64).to(dtype)
    return anchor_distance(similarity.movedim(1, -1), threshold)


def words(batch, tokens):
    """Rows of words only, of words with padding between them, and of padding only."""
    mask = torch.stack([torch.arange(tokens) % 3 != 1] * batch)
    mask[0] = True
    mask[2:] = False
    return mask


def both(module, distance, grid, mask, text_window, patch_window, metric):
    results = []
    weight = torch.randn(distance.shape, generator=torch.Generator().manual_seed(9))
    reach = text_window // 2, math.isqrt(patch_window) // 2
    for kernel in (False, True):
        leaf = distance.detach().clone().requires_grad_()
        if kernel:
            path, reachable = module.windowed_path(leaf, grid, mask, *reach, metric)
        else:
            # On the CPU PyTorch computes it.
            on_cpu = None if mask is None else mask.cpu()
            windows = text_window, patch_window, metric
            path, reachable = anchor_path(leaf.cpu(), grid, on_cpu, *windows)
        (path * weight.to(path)).sum().backward()
        results.append([x.cpu() for x in (path.detach(), reachable, leaf.grad)])
    return results


def assert_equal(plain, kernel, atol=1e-6):
    assert torch.equal(kernel[1], plain[1])
    torch.testing.assert_close(kernel[0], plain[0], rtol=0, atol=atol)
    torch.testing.assert_close(kernel[2], plain[2], rtol=0, atol=4 * atol)


CASES = [
    # grid, tokens, groups, text window, patch window
    ((3, 4), 6, 2, 5, 9),
    ((3, 3), 4, 1, 3, 25),
    *(
        pytest.param(*case, marks=pytest.mark.nightly)
        for case in (((5, 2), 3, 1, 1, 9), ((4, 4), 5, 3, 3, 1), ((1, 7), 2, 2, 5, 9))
    ),
]


@pytest.mark.parametrize(("grid", "tokens", "groups", "text_window", "patch_window"), CASES)
@pytest.mark.parametrize(
    ("metric", "masked"), [("euclidean", False), *((metric, True) for metric in METRICS)]
)
def test_equals_pytorch(
    interpreted, grid, tokens, groups, text_window, patch_window, metric, masked
):
    batch = 3 if masked else 1
    distance = distances(batch, grid, tokens, groups)
    mask = words(batch, tokens) if masked else None
    plain, kernel = both(interpreted, distance, grid, mask, text_window, patch_window, metric)
    assert_equal(plain, kernel)
    if grid == (3, 4):
        assert not kernel[1].all()
        assert kernel[1].any()


def test_float64_keeps_its_digits(interpreted):
    distance = distances(1, (3, 4), 6, 2, dtype=torch.float64)
    plain, kernel = both(interpreted, distance, (3, 4), None, 5, 9, "euclidean")
    assert_equal(plain, kernel, 1e-12)


def test_half_precision_comes_back_as_it_went_in(interpreted):
    distance = distances(2, (3, 3), 4, 2, dtype=torch.float16)
    path, reachable = interpreted.windowed_path(distance, (3, 3), words(2, 4), 2, 1, "euclidean")
    exact, same = anchor_path(distance.float(), (3, 3), words(2, 4))
    assert path.dtype == torch.float16
    assert torch.equal(reachable, same)
    torch.testing.assert_close(path.float(), exact, rtol=1e-3, atol=0)


@pytest.mark.parametrize("layout", ["groups last", "slice", "expanded", "transposed"])
def test_any_strides(interpreted, layout):
    distance = distances(2, (4, 3), 5, 2)
    if layout == "groups last":
        distance = distance.contiguous()
    elif layout == "slice":
        distance = distances(2, (4, 3), 8, 4)[:, :, 1:6, ::2]
    elif layout == "expanded":
        distance = distance[:1].expand(2, -1, -1, -1)
    else:
        distance = distance.permute(3, 1, 2, 0).contiguous().permute(3, 1, 2, 0)
    leaf = distance.detach().requires_grad_()
    path, reachable = interpreted.windowed_path(leaf, (4, 3), words(2, 5), 2, 1, "manhattan")
    plain, same = anchor_path(distance, (4, 3), words(2, 5), metric="manhattan")
    assert torch.equal(reachable, same)
    torch.testing.assert_close(path.detach(), plain, rtol=0, atol=1e-6)
    # A gradient with other strides than the path, here none at all.
    gradient = torch.autograd.grad(path.sum(), leaf)[0]
    reference = distance.detach().clone().requires_grad_()
    anchor_path(reference, (4, 3), words(2, 5), metric="manhattan")[0].sum().backward()
    torch.testing.assert_close(gradient, reference.grad)


def test_more_steps_than_a_byte_counts_and_more_entries_than_a_program_takes(interpreted):
    distance = distances(1, (4, 4), 7, 1, threshold=0.95)
    assert_equal(*both(interpreted, distance, (4, 4), None, 11, 25, "euclidean"))
    distance = distances(2, (6, 5), 9, 2)
    assert_equal(*both(interpreted, distance, (6, 5), words(2, 9), 5, 9, "chebyshev"))


def test_nothing_reachable_and_nothing_at_all(interpreted):
    nothing = torch.full((2, 4, 3, 2), math.inf).requires_grad_()
    path, reachable = interpreted.windowed_path(nothing, (2, 2), None, 2, 1, "euclidean")
    assert not reachable.any()
    assert not path.any()
    path.sum().backward()
    assert not nothing.grad.any()
    empty = torch.empty(0, 4, 3, 2, requires_grad=True)
    path, reachable = interpreted.windowed_path(empty, (2, 2), None, 2, 1, "euclidean")
    assert path.shape == reachable.shape == empty.shape
    path.sum().backward()
    assert empty.grad.shape == empty.shape


def test_of_equally_near_sources_one_gets_the_gradient(interpreted):
    distance = torch.tensor([2.0, math.inf, 2.0]).view(1, 3, 1, 1).requires_grad_()
    path, _ = interpreted.windowed_path(distance, (1, 3), None, 0, 1, "euclidean")
    assert path.flatten().tolist() == [2, 3, 2]
    path[:, 1].sum().backward()
    assert distance.grad.flatten().tolist() == [1, 0, 0]


def test_reachable_has_no_gradient_and_the_path_only_one(interpreted):
    distance = distances(1, (2, 2), 3, 1).requires_grad_()
    path, reachable = interpreted.windowed_path(distance, (2, 2), None, 2, 1, "euclidean")
    assert not reachable.requires_grad
    gradient = torch.autograd.grad(path.square().sum(), distance, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


every_arch = pytest.mark.parametrize("arch", [80, 90, 100])
SPILLED = {"contextual": 104, "bias": 16}
"""Bytes of a thread at most, which stay in the first cache.

Forward the compiler is told to end the registers at 168, so that one more program runs at a time;
backward a thread takes all 255 to hold the paths of all groups.
"""


@pytest.fixture
def _compiled(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.nightly
@every_arch
@pytest.mark.usefixtures("_compiled")
@pytest.mark.parametrize("groups_last", [False, True])
@pytest.mark.parametrize(
    ("kernel", "type_", "patch_reach"),
    [
        ("forward", "fp32", 1),
        ("backward", "bf16", 1),
        ("forward", "bf16", 4),
        ("backward", "fp32", 4),
    ],
)
def test_path_kernels_compile_for_gpus(kernel, type_, patch_reach, groups_last, arch):
    """The interpreter takes Python that the compiler refuses."""
    from triton.language import float32

    function = getattr(anchor_triton, f"path_{kernel}_kernel")
    constants = {"ROWS": 16, "COLUMNS": 16, "TEXT_REACH": 2, "PATCH_REACH": patch_reach}
    constants |= {"METRIC": "euclidean", "ENTRIES": windowed_path._window_entries(2, patch_reach)}
    constants |= {"GROUPS_LAST": groups_last, "DTYPE": float32, "BLOCK": windowed_path._BLOCK}
    constants |= {"MASKED": True, "SAVE_WINNER": True}
    states = ("distance", "path", "path_grad", "distance_grad")
    types = dict.fromkeys(states, f"*{type_}") | dict.fromkeys(("word_mask", "reachable"), "*u8")
    types["winner"] = "*u8" if constants["ENTRIES"] < 256 else "*i16"
    spilled = compile_kernel(function, constants, types, arch).spilled
    widest = (kernel, patch_reach, groups_last, arch) == ("backward", 4, True, 80)
    assert spilled <= (16 if widest else 0)


@pytest.mark.nightly
@every_arch
@pytest.mark.usefixtures("_compiled")
@pytest.mark.parametrize("width", [32, 64, 128])
@pytest.mark.parametrize("mode", SPILLED)
@pytest.mark.parametrize("asking", TOKENS)
@pytest.mark.parametrize("kernel", ["attention_forward", "attention_backward", "path_grad"])
def test_attention_kernels_compile_for_gpus(kernel, asking, mode, width, arch):
    assert anchor_kernel(kernel, asking, mode, width, arch).spilled <= SPILLED[mode]


@pytest.mark.nightly
@every_arch
@pytest.mark.usefixtures("_compiled")
@pytest.mark.parametrize("kernel", ["terms", "terms_backward"])
def test_terms_kernels_spill_nothing(kernel, arch):
    function = getattr(anchor_triton, f"{kernel}_kernel")
    types = dict.fromkeys((name for name in function.arg_names if name != "width"), "*fp32")
    sizes = {"GROUPS": 8, "DOT_G": 16, "BLOCK": 32, "POOLED": True}
    assert compile_kernel(function, sizes, types, arch, ("width",)).spilled == 0


def test_cpu_tensors_never_import_triton():
    program = (
        "import sys, torch; from vlp.positions.anchor import anchor_path; "
        "anchor_path(torch.rand(4, 3, 2), (2, 2)); sys.exit('triton' in sys.modules)"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)


def test_windows_that_are_too_large_are_left_to_pytorch():
    assert windowed_path.kernel_supports(2, 1)
    assert windowed_path.kernel_supports(100, 4)
    assert not windowed_path.kernel_supports(2, 5)
    assert not windowed_path.kernel_supports(1000, 4)


@pytest.mark.gpu
@pytest.mark.parametrize(("grid", "tokens", "groups", "text_window", "patch_window"), CASES)
@pytest.mark.parametrize("metric", METRICS)
def test_on_a_gpu(grid, tokens, groups, text_window, patch_window, metric):
    distance = distances(3, grid, tokens, groups).cuda()
    mask = words(3, tokens).cuda()
    plain, kernel = both(windowed_path, distance, grid, mask, text_window, patch_window, metric)
    assert_equal(plain, kernel)
    path, _ = anchor_path(distance, grid, mask, text_window, patch_window, metric)
    assert torch.equal(path.cpu(), kernel[0])
    tied = torch.tensor([2.0, math.inf, 2.0], device="cuda").view(1, 3, 1, 1).requires_grad_()
    anchor_path(tied, (1, 3))[0][:, 1].sum().backward()
    assert tied.grad.flatten().tolist() == [1, 0, 0]  # the kernel's; PyTorch divides it
