"""The models of PipeEdge's runtime under PipeEdge's names, split into quarters of blocks."""

from __future__ import annotations

from dataclasses import dataclass

from hpgo.base.messages import did_you_mean, shorten
from hpgo.errors import ArgumentError
from hpgo.runtime.grouping import QUARTER
from hpgo.runtime.workload import Workload

_EPS = "norm_eps=1e-12"
"""Epsilon of norms in the published configurations of these models."""


@dataclass(frozen=True, slots=True)
class PipeEdgeRuntimeModel:
    """A model of PipeEdge's runtime."""

    name: str
    sizes: str
    """Name and sizes for `Workload.read`."""
    layers: int
    """Number of layers, which is four for each block."""
    file: str
    """PipeEdge's name for the file of the weights."""
    reads_text: bool = False

    def workload(self, length: int = 0) -> Workload:
        """Return the model's workload. `length` is the number of tokens, for models that read texts."""
        # BERT has position embeddings for 512 tokens, but each run pads texts only to its longest one.
        length_of_texts = f",length={length}" if self.reads_text else ""
        return Workload.read(f"{self.sizes},{_EPS}{length_of_texts}").by(QUARTER)


MODELS = {
    model.name: model
    for model in (
        PipeEdgeRuntimeModel("google/vit-base-patch16-224", "vit:layers=12", 48, "ViT-B_16-224.npz"),
        PipeEdgeRuntimeModel(
            "google/vit-large-patch16-224", "vit:layers=24,hidden=1024,heads=16", 96, "ViT-L_16-224.npz"
        ),
        PipeEdgeRuntimeModel(
            "google/vit-huge-patch14-224-in21k",
            "vit:layers=32,hidden=1280,heads=16,patch=14,classes=21843",
            128,
            "ViT-H_14.npz",
        ),
        PipeEdgeRuntimeModel("bert-base-uncased", "bert:layers=12", 48, "BERT-B.npz", reads_text=True),
        PipeEdgeRuntimeModel(
            "bert-large-uncased", "bert:layers=24,hidden=1024,heads=16", 96, "BERT-L.npz", reads_text=True
        ),
        PipeEdgeRuntimeModel(
            "textattack/bert-base-uncased-CoLA", "bert:layers=12,classes=2", 48, "BERT-B-CoLA.npz", reads_text=True
        ),
        PipeEdgeRuntimeModel("facebook/deit-base-distilled-patch16-224", "deit-base:", 48, "DeiT_B_distilled.npz"),
        PipeEdgeRuntimeModel("facebook/deit-small-distilled-patch16-224", "deit-small:", 48, "DeiT_S_distilled.npz"),
        PipeEdgeRuntimeModel("facebook/deit-tiny-distilled-patch16-224", "deit-tiny:", 48, "DeiT_T_distilled.npz"),
    )
}
"""All models by PipeEdge's name."""


def model_named(name: str) -> PipeEdgeRuntimeModel:
    """Return one of `MODELS`; raise ArgumentError for an unknown name.

    >>> len(model_named("bert-large-uncased").workload(length=16).layers)
    96
    """
    if name not in MODELS:
        raise ArgumentError(f"there is no model `{shorten(name)}`", did_you_mean(name, MODELS), code="unknown_name")
    return MODELS[name]
