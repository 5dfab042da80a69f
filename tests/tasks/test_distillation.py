import pytest
import torch
from pair_shards import entailment_shards, statement_shards, tiny_folder
from question_shards import AUGMENT, coloured, toy_parts, write_shards
from tests_support import first_batch

from vlp.models.folder import from_pretrained
from vlp.tasks.downstream.task import load_task, start_parts
from vlp.tasks.pair_classification.task import Nlvr2Config, SnliVeConfig
from vlp.tasks.pair_classification.task import build as build_pairs
from vlp.tasks.vqa.task import VqaConfig
from vlp.tasks.vqa.task import build as build_vqa

TEACHER = {"momentum": 0.9, "alpha": 0.4}


def settings(kind, shards, **task):
    data = {"train": [str(shards)], "augment": AUGMENT, "canonical_streams": 1}
    return kind.model_validate({"data": data} | task)


def snli_ve(tmp_path, teacher=TEACHER, kind=SnliVeConfig, write=entailment_shards):
    parts, _ = start_parts(str(tiny_folder(tmp_path / "start")), {})
    config = settings(kind, write(tmp_path / "train", 8), teacher=teacher)
    return build_pairs(config, parts, 4, 0, "float32")


def nlvr2(tmp_path):
    return snli_ve(tmp_path, kind=Nlvr2Config, write=statement_shards)


def vqa(tmp_path):
    shards = write_shards(tmp_path / "questions", coloured(12))
    config = settings(VqaConfig, shards, teacher=TEACHER, decoder={"layers": 2})
    return build_vqa(config, toy_parts(), 4, 0, "float32")


def taught(task, epoch_steps=10, noise=0.3):
    task.start_teacher(epoch_steps)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in task.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    return task


@pytest.mark.parametrize("kind", [snli_ve, nlvr2])
def test_the_loss_of_pairs_is_the_sum_over_samples_and_classes(kind, tmp_path):
    task, data = kind(tmp_path)
    taught(task)
    batch = first_batch(data)
    batch = batch._replace(valid=torch.tensor([True, True, False, True]))
    with torch.no_grad():
        student = task.logits(batch).double().softmax(-1)
        teacher = task.teacher.module.logits(batch).double().softmax(-1)
        assert not torch.allclose(student, teacher, atol=0.01)
        for step, alpha in [(0, 0.0), (5, 0.2), (10, 0.4), (99, 0.4)]:
            total = 0.0
            for row in (0, 1, 3):
                label = int(batch.labels[row])
                total -= (1 - alpha) * float(student[row, label].log())
                for name in range(student.shape[1]):
                    total -= alpha * float(teacher[row, name] * student[row, name].log())
            assert float(task(batch, step).loss) == pytest.approx(total / 3, rel=1e-5)


def test_the_loss_of_answers_is_the_sum_over_answers_and_word_pieces(tmp_path):
    task, data = vqa(tmp_path)
    taught(task)
    batch = first_batch(data)

    def odds(one, answer):
        """Log-probabilities of each next word piece of one answer, (pieces, vocabulary)."""
        words = one.model.text_encoder.embedding
        memory = one.remember(batch).select(batch.question_index[answer : answer + 1])
        ids = batch.answer_ids[answer]
        ids = ids[ids != task.text.pad_id]
        states = one.decoder(ids[None], memory, words)
        return one.decoder.logits(states, words)[0].double().log_softmax(-1), ids

    with torch.no_grad():
        hard = soft = 0.0
        for answer, share in enumerate(batch.answer_weights.tolist()):
            student, ids = odds(task, answer)
            teacher, _ = odds(task.teacher.module, answer)
            for place in range(len(ids) - 1):
                hard -= share * float(student[place, ids[place + 1]]) / len(batch.valid)
                soft -= share * float((teacher[place].exp() * student[place]).sum())
        expected = 0.6 * hard + 0.4 * soft / len(batch.valid)
        assert float(task(batch, 10).loss) == pytest.approx(expected, rel=1e-5)
        assert float(task.eval()(batch, 10).loss) == pytest.approx(hard, rel=1e-5)
        assert task(data.collate([]), 10).loss == 0


def test_alpha_rises_over_the_configured_steps_or_the_first_epoch(tmp_path):
    task, data = snli_ve(tmp_path, TEACHER | {"warmup_steps": 4})
    batch = first_batch(data)
    for warmup_steps, expected in [(4, [0.0, 0.2, 0.4]), (0, [0.4] * 3), (None, [0, 0.1, 0.2])]:
        teacher = task.config.teacher.model_copy(update={"warmup_steps": warmup_steps})
        task.config = task.config.model_copy(update={"teacher": teacher})
        task.start_teacher(epoch_steps=8)
        found = [task.soft_target(step, "cpu", lambda t: t.logits(batch)) for step in (0, 2, 4)]
        assert [alpha for _, alpha in found] == pytest.approx(expected)


def test_without_a_teacher_and_in_evaluation_the_loss_is_the_plain_one(tmp_path):
    task, data = snli_ve(tmp_path)
    batch = first_batch(data)
    plain = task(batch, 10).loss
    task.start_teacher(10)
    assert not torch.equal(task(batch, 10).loss, plain)
    assert torch.equal(task.eval()(batch, 10).loss, plain)
    untaught, _ = snli_ve(tmp_path / "untaught", None)
    untaught.start_teacher(10)
    assert untaught.teacher is None
    assert untaught.extra_state() == {}


def test_the_teacher_follows_the_whole_student_and_gets_no_gradient(tmp_path):
    task, data = nlvr2(tmp_path)
    taught(task)
    before = {name: value.clone() for name, value in task.teacher.state_dict().items()}
    task(first_batch(data), 10).loss.backward()
    task.after_step(lambda: dict(task.named_parameters()))
    moved = task.teacher.state_dict()
    assert {"tags", "head.0.weight", "model.image_encoder.vit.pos_embed"} < moved.keys()
    for name, parameter in task.named_parameters():
        expected = 0.9 * before[name] + 0.1 * parameter.detach()
        torch.testing.assert_close(moved[name], expected)
    assert not any(one.requires_grad for one in task.teacher.module.parameters())
    assert not any(name.startswith("teacher") for name in task.state_dict())


def test_the_state_goes_into_another_task_and_no_further_than_the_checkpoint(tmp_path):
    task, data = snli_ve(tmp_path)
    taught(task)
    state = {name: value.clone() for name, value in task.extra_state().items()}
    other, _ = snli_ve(tmp_path / "other")
    with pytest.raises(ValueError, match="unknown state teacher"):
        other.load_extra_state(state)
    other.start_teacher(10)
    other.load_extra_state(state)
    other.load_state_dict(task.state_dict())
    batch = first_batch(data)
    assert torch.equal(other(batch, 10).loss, task(batch, 10).loss)
    task.save_model(tmp_path / "saved", task.state_dict())
    assert not any("teacher" in name for name in from_pretrained(tmp_path / "saved").heads)
    assert load_task(tmp_path / "saved").teacher is None
