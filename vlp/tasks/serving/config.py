"""The configuration of transformers' classes: `config.json` of a model folder as it stands."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from vlp.config import merged, require_plugins, validated
from vlp.models.config import ModelConfig
from vlp.positions import list_positions

_MODELS = ("vlp.tasks.serving.model", "vlp.tasks.serving.question_answering")


class VlpConfig(PreTrainedConfig):
    """Sizes of a `VlpModel`: the keys of `vlp.models.config.ModelConfig`.

    Args:
        text: keys of the text encoder.
        image: keys of the image encoder.
        cross: keys of the cross-modal encoder.
        embed_dim: see `ModelConfig`.
        temperature: see `ModelConfig`.
        feature_dropout: see `ModelConfig`.
        token_projection: see `ModelConfig`.
        plugins: module of each encoding that is none of this package's, as `config.json` has them;
            they must be imported already.
        options: transformers' own, such as `id2label`; they are not saved.

    Raises:
        ConfigError: a key is unknown, or a value does not fit.
    """

    model_type = "vlp"

    def __init__(
        self,
        text: Mapping[str, Any] | None = None,
        image: Mapping[str, Any] | None = None,
        cross: Mapping[str, Any] | None = None,
        embed_dim: int = 256,
        temperature: float = 0.07,
        feature_dropout: float = 0,
        token_projection: bool = True,
        plugins: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        given = {
            "text": text or {},
            "image": image or {},
            "cross": cross or {},
            "embed_dim": embed_dim,
            "temperature": temperature,
            "feature_dropout": feature_dropout,
            "token_projection": token_projection,
        }
        require_plugins(plugins or {}, list_positions(), "encoding", "VlpConfig")
        sizes = validated(given, ModelConfig, "VlpConfig").model_dump(mode="json")
        super().__init__(**options)
        for name, value in sizes.items():
            setattr(self, name, value)
        for module in _MODELS:  # before an Auto class looks for the model of a configuration
            importlib.import_module(module)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **options: Any) -> Any:
        """Return the configuration of a `config.json`, with changes.

        Args:
            config_dict: what the file holds.
            options: keys of the configuration, of which a part of a section leaves the rest of it;
                and transformers' own.

        Raises:
            ConfigError: a key is unknown, or a value does not fit.
        """
        options.pop("attn_implementation", None)  # layers choose it by device
        changes = {name: options.pop(name) for name in ModelConfig.model_fields if name in options}
        return super().from_dict(merged(config_dict, changes), **options)

    @property
    def sizes(self) -> ModelConfig:
        """Return the keys as the model takes them.

        Raises:
            ConfigError: one was changed to what does not fit.
        """
        given = {name: getattr(self, name) for name in ModelConfig.model_fields}
        return validated(given, ModelConfig, "VlpConfig")

    @classmethod
    def of(cls, sizes: ModelConfig, **options: Any) -> VlpConfig:
        """Return the configuration of a model of these sizes."""
        return cls(**sizes.model_dump(mode="json"), **options)

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **options: Any
    ) -> None:
        """Write `config.json`, as training does.

        Args:
            save_directory: made if missing.
            push_to_hub: upload it, too.
            options: of `push_to_hub`, such as `repo_id`.
        """
        from vlp.models.folder import save_sizes  # only who saves a model has to import it

        folder = Path(save_directory)
        save_sizes(folder, self.sizes)
        if push_to_hub:
            self.push_to_hub(options.pop("repo_id", folder.name), **options)


AutoConfig.register("vlp", VlpConfig, exist_ok=True)
