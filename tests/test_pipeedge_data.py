"""Published weights and data become what models read: archives as they are, against transformers where it is there."""

from __future__ import annotations

import io
import struct
import sys
import tarfile
import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hpgo

torch = pytest.importorskip("torch", reason="needs torch: pip install torch")

from refusals import refused  # noqa: E402

from hpgo.runtime import Workload  # noqa: E402 -- what needs torch, where there is one
from hpgo.runtime.pipeedge.cola import sentences  # noqa: E402
from hpgo.runtime.pipeedge.data import DataOptions, read_data  # noqa: E402
from hpgo.runtime.pipeedge.imagenet import pictures, pixels, synsets  # noqa: E402
from hpgo.runtime.pipeedge.models import model_named  # noqa: E402
from hpgo.runtime.pipeedge.weights import with_weights  # noqa: E402
from hpgo.runtime.pipeedge.wordpiece import WordPieces  # noqa: E402
from hpgo.runtime.tensor_files import TensorFile  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Mapping

NEEDS = "needs scipy: pip install scipy"
VIT, BERT = "google/vit-base-patch16-224", "textattack/bert-base-uncased-CoLA"


# --- Weights ----------------------------------------------------------------------------------------------------------

IMAGES = "layers=2,hidden=16,heads=2,image=16,patch=8,classes=5,norm_eps=1e-12"
TEXTS = "bert:layers=2,hidden=16,heads=2,vocabulary=30,positions=12,length=8,classes=3,norm_eps=1e-12"


def outputs(workload: Workload, inputs: torch.Tensor) -> torch.Tensor:
    (part,) = workload.parts([workload.layers])
    with torch.no_grad():
        made: torch.Tensor = part.eval()(inputs, rows=len(inputs))[0]
    return made


def quarters(text: str) -> Workload:
    return Workload.read(text).by("quarter")


def of_hugging_face(name: str) -> Any:
    """A small model with random weights."""
    transformers = pytest.importorskip("transformers", reason="compares with transformers")
    sizes = {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
        "layer_norm_eps": 1e-12,
    }  # fmt: skip
    torch.manual_seed(1)
    if name == "Bert":
        config = transformers.BertConfig(vocab_size=30, max_position_embeddings=12, num_labels=3, **sizes)
    else:
        config = getattr(transformers, f"{name}Config")(image_size=16, patch_size=8, num_labels=5, **sizes)
    kind = "ForSequenceClassification" if name == "Bert" else "ForImageClassification"
    made = getattr(transformers, f"{name}{kind}")(config).eval()
    for weight in made.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    return made


@pytest.mark.parametrize("name", ["ViT", "DeiT", "Bert"])
def test_hugging_faces_weights_make_hugging_faces_outputs(name: str, tmp_path: Path) -> None:
    model = of_hugging_face(name)
    model.save_pretrained(tmp_path)
    with TensorFile(tmp_path / "model.safetensors") as file:
        tensors = {key: file.read(key) for key in file}
    if name == "Bert":
        inputs = torch.randint(1, 30, (3, 8))
        inputs[1, 5:] = 0
        given = {"input_ids": inputs, "attention_mask": (inputs != 0).long()}
    else:
        inputs = torch.randn(3, 3, 16, 16)
        given = {"pixel_values": inputs}
    with torch.no_grad():
        wanted = model(**given).logits
    text = {"Bert": TEXTS, "ViT": f"vit:{IMAGES}", "DeiT": f"vit:{IMAGES},distilled"}[name]
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    np.savez(tmp_path / "weights.npz", **{key: tensor.numpy() for key, tensor in tensors.items()})
    for path in (tmp_path, tmp_path / "pytorch_model.bin", tmp_path / "weights.npz"):
        found = outputs(with_weights(quarters(text), path), inputs)
        assert torch.allclose(found, wanted, atol=2e-5), path


def published(ours: Mapping[str, torch.Tensor], way: str) -> dict[str, np.ndarray[Any, Any]]:
    """Weights by our names, as Google's and the hub's files have them."""
    found: dict[str, Any] = {}
    for name, tensor in ours.items():
        array = tensor.detach().numpy()
        layer, _, inner = name.partition("/")
        number = int(layer.partition(".")[0].rpartition("-")[2]) - 1
        stem, _, kind = inner.removeprefix("block.").rpartition(".")
        if way == "hub":
            stems = {
                "norm_1": f"blocks.{number}.norm1", "attend": f"blocks.{number}.attn.qkv",
                "join": f"blocks.{number}.attn.proj", "norm_2": f"blocks.{number}.norm2",
                "widen": f"blocks.{number}.mlp.fc1", "narrow": f"blocks.{number}.mlp.fc2",
                "before.convolve": "patch_embed.proj", "behind.norm": "norm", "behind.linear": "head",
            }  # fmt: skip
            if inner == "before.whole":
                found |= {"cls_token": array[None, :1], "dist_token": array[None, 1:]}
            elif inner == "before.positions":
                found["pos_embed"] = array[None]
            else:
                found[f"{stems[stem]}.{kind}"] = array
            continue
        root = f"Transformer/encoderblock_{number}/"
        heads = root + "MultiHeadDotProductAttention_1/"
        if inner in {"before.whole", "before.positions"}:
            key = "cls" if inner == "before.whole" else "Transformer/posembed_input/pos_embedding"
            found[key] = array[None]
        elif stem == "attend":
            for at, part in enumerate(("query", "key", "value")):
                piece = array[16 * at : 16 * at + 16]
                if kind == "weight":
                    found[f"{heads}{part}/kernel"] = piece.T.reshape(16, 2, 8)
                else:
                    found[f"{heads}{part}/bias"] = piece.reshape(2, 8)
        elif stem == "before.convolve" and kind == "weight":
            found["embedding/kernel"] = array.transpose(2, 3, 1, 0)
        else:
            stems = {
                "norm_1": root + "LayerNorm_0", "join": heads + "out", "norm_2": root + "LayerNorm_2",
                "widen": root + "MlpBlock_3/Dense_0", "narrow": root + "MlpBlock_3/Dense_1",
                "before.convolve": "embedding", "behind.norm": "Transformer/encoder_norm", "behind.linear": "head",
            }  # fmt: skip
            if kind == "bias":
                found[f"{stems[stem]}/bias"] = array
            elif "norm" in stem:
                found[f"{stems[stem]}/scale"] = array
            else:
                found[f"{stems[stem]}/kernel"] = array.T.reshape(2, 8, 16) if stem == "join" else array.T
    return found


@pytest.mark.parametrize("way", ["google", "hub"])
def test_arrays_of_google_and_of_the_hub_are_read_into_the_layers_they_belong_to(way: str, tmp_path: Path) -> None:
    text = f"vit:{IMAGES}" + (",distilled" if way == "hub" else "")
    drawn = quarters(text)
    (part,) = drawn.parts([drawn.layers], seed=5)
    ours = {f"{layer}/{name}": tensor for layer, held in part.by_layer().items() for name, tensor in held.items()}
    with torch.no_grad():
        for tensor in ours.values():
            tensor.copy_(torch.randn(tensor.shape))
    np.savez(tmp_path / "published.npz", **published(ours, way))
    images = torch.randn(3, 3, 16, 16)
    with torch.no_grad():
        wanted = part.eval()(images, rows=3)[0]
    read = with_weights(quarters(text), tmp_path / "published.npz")
    assert torch.equal(outputs(read, images), wanted)
    first, second = read.parts([read.layers[:3], read.layers[3:]])  # stages read what they hold
    with torch.no_grad():
        assert torch.equal(second.eval()(*first.eval()(images, rows=3), rows=3)[0], wanted)


def test_weights_that_do_not_fit_are_told(tmp_path: Path) -> None:
    drawn = quarters(f"vit:{IMAGES}")
    (part,) = drawn.parts([drawn.layers])
    ours = {f"{layer}/{name}": tensor for layer, held in part.by_layer().items() for name, tensor in held.items()}
    whole = published(ours, "google")
    for change, words in (
        ({"head/kernel": np.zeros((16, 7), np.float32)}, r"has the shape \(7, 16\) for `behind.linear.weight`"),
        ({"head/kernel": None}, "lacks `head.weight`"),
        ({"embedding/kernel": None}, "the naming scheme of"),
    ):
        arrays = {key: array for key, array in (whole | change).items() if array is not None}
        np.savez(tmp_path / "x.npz", **arrays)
        with pytest.raises(hpgo.errors.ArgumentError, match=words) as caught:
            outputs(with_weights(quarters(f"vit:{IMAGES}"), tmp_path / "x.npz"), torch.zeros(1, 3, 16, 16))
        assert caught.value.hint
    (tmp_path / "none.npz").write_bytes(b"PK no archive")
    (tmp_path / "empty").mkdir()
    for path, words in (("none.npz", "can't be read"), ("empty", "there are no weights in the folder")):
        with pytest.raises(hpgo.errors.FileError, match=words):
            with_weights(quarters(f"vit:{IMAGES}"), tmp_path / path)


# --- Texts ------------------------------------------------------------------------------------------------------------

VOCABULARY = [
    "[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "boat", "##s", "sank", ".", "a", "##a", "na", "##i", "##ve", "!", "café",
    "cafe", "'", "s", "$", "中", "un", "##able", "##e", "di", "##ed",
]  # fmt: skip
SAYINGS = [
    "The boats sank.",
    "naïve CAFÉ!!",
    "the boat's $a",
    "中the中",
    "unable died boatss",
    "",
    "  \t the\u200b\x00a ",
]


def test_words_are_parted_as_transformers_parts_them(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="compares with transformers")
    (tmp_path / "vocab.txt").write_text("\n".join([*VOCABULARY, "[MASK]"]), encoding="utf-8")
    theirs = transformers.BertTokenizer.from_pretrained(tmp_path)
    ours = WordPieces([*VOCABULARY, "[MASK]"])
    for text in SAYINGS:
        assert ours.tokens(text, maximum=99) == theirs(text)["input_ids"], text
    assert ours.tokens("the " * 50, maximum=8) == theirs("the " * 50, max_length=8, truncation=True)["input_ids"]


def test_a_vocabulary_without_the_pieces_of_every_text_is_refused() -> None:
    with pytest.raises(hpgo.errors.ArgumentError, match=r"the vocabulary has no `\[UNK\]`"):
        WordPieces(["the", "boat"])


@pytest.mark.parametrize("module", ["tokenizers", "scipy.io", "PIL.Image"])
def test_a_missing_library_is_named_with_the_extra_that_installs_it(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    readers = {
        "tokenizers": lambda: WordPieces(VOCABULARY),
        "scipy.io": lambda: synsets(b""),
        "PIL.Image": lambda: pixels(b"", crops=False),
    }
    with pytest.raises(
        hpgo.errors.ArgumentError, match=f"need `{module.partition('.')[0]}`, which can't be imported"
    ) as caught:
        readers[module]()
    assert "extra `pipeedge`" in str(caught.value.hint)


def zipped(path: Path, files: dict[str, str]) -> None:
    with zipfile.ZipFile(path, "w") as held:
        for name, text in files.items():
            held.writestr(name, text)


LINES = 'gj04\t1\t\tThe boats sank.\ngj04\t0\t*\tThe "boat sank\n'
WANTED = [("The boats sank.", 1), ('The "boat sank', 0)]


def test_colas_archives_are_read_as_they_were_published(tmp_path: Path) -> None:
    glue, authors, unpacked = (tmp_path / name for name in ("glue", "authors", "unpacked"))
    for folder in (glue, authors, unpacked):
        folder.mkdir()
    test = "index\tsentence\n0\tThe boat.\n"
    zipped(glue / "CoLA.zip", {"CoLA/train.tsv": LINES, "CoLA/dev.tsv": LINES[::1], "CoLA/test.tsv": test})
    zipped(
        authors / "cola_public_1.1.zip",
        {
            "cola_public/tokenized/in_domain_train.tsv": "x\t0\t\tnot this\n",
            "cola_public/raw/in_domain_train.tsv": LINES,
            "cola_public/raw/in_domain_dev.tsv": LINES,
        },
    )
    (unpacked / "CoLA").mkdir()
    (unpacked / "CoLA/train.tsv").write_text(LINES)
    for folder in (glue, authors, unpacked):
        assert sentences(folder, "train") == WANTED
    assert sentences(authors, "validation") == sentences(glue, "dev") == WANTED
    assert sentences(glue, "test") == [("The boat.", None)]
    for folder, split, words in (
        (glue, "all", "no split `all`"),
        (unpacked, "validation", "there is no dev.tsv"),
        (tmp_path, "train", "CoLA.zip"),
    ):
        with pytest.raises(hpgo.errors.FileError) as caught:
            sentences(folder, split)
        assert words in f"{caught.value.message} {caught.value.hint}"
    (unpacked / "CoLA/dev.tsv").write_text("one\ttwo\n")
    with refused(hpgo.errors.FileError, "invalid_file", "1"):
        sentences(unpacked, "dev")


def wanted(**how: Any) -> DataOptions:
    given: dict[str, Any] = {
        "name": None, "root": None, "split": "train", "indices": None, "shuffle": False, "samples": 8, "beside": Path(),
    }  # fmt: skip
    return DataOptions(**given | how)


def test_sentences_become_tokens_of_one_length_with_labels(tmp_path: Path) -> None:
    zipped(tmp_path / "CoLA.zip", {"CoLA/train.tsv": LINES + "x\t1\t\tThe boat\n"})
    asked = {"name": "CoLA", "root": tmp_path, "beside": tmp_path}
    with refused(hpgo.errors.FileError, "unknown_name"):
        read_data(wanted(**asked), model_named(BERT))
    (tmp_path / "vocab.txt").write_text("\n".join(VOCABULARY), encoding="utf-8")
    data = read_data(wanted(**asked), model_named(BERT))
    assert (len(data), data.length) == (3, 7)
    assert data.rows(0, 3).tolist() == [[2, 4, 5, 6, 7, 8, 3], [2, 4, 1, 5, 7, 3, 0], [2, 4, 5, 3, 0, 0, 0]]
    scores = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    assert data.right(0, scores) == (1, 2)
    assert data.right(2, scores[:1]) == (1, 1)
    np.save(tmp_path / "order.npy", np.array([2, 0]))
    torch.save(torch.tensor([2, 0]), tmp_path / "order.pt")
    for file in ("order.npy", "order.pt"):
        chosen = read_data(wanted(**asked, indices=tmp_path / file), model_named(BERT))
        assert chosen.rows(0, 2)[:, :5].tolist() == [[2, 4, 5, 3, 0], [2, 4, 5, 6, 7]]
    mixed = read_data(wanted(**asked, shuffle=True), model_named(BERT))
    assert sorted(mixed.rows(0, 3).tolist()) == sorted(data.rows(0, 3).tolist())
    np.save(tmp_path / "order.npy", np.array([3]))
    with refused(hpgo.errors.ArgumentError, "unknown_name", "3", "CoLA"):
        read_data(wanted(**asked, indices=tmp_path / "order.npy"), model_named(BERT))
    with refused(hpgo.errors.ArgumentError, "invalid_argument", "CoLA"):
        read_data(wanted(**asked), model_named(VIT))


def test_random_data_is_the_same_in_every_run() -> None:
    for name, shape in ((VIT, (3, 224, 224)), (BERT, (64,))):
        one, other = (read_data(wanted(), model_named(name)) for _ in range(2))
        assert torch.equal(one.rows(3, 8), other.rows(3, 9))
        assert one.rows(6, 9).shape == (2, *shape)
        assert one.right(0, torch.zeros(2, 5)) is None


# --- Images -----------------------------------------------------------------------------------------------------------


def element(kind: int, data: bytes) -> bytes:
    """One of MATLAB's, as its format's description has it."""
    if len(data) <= 4:
        return struct.pack("<HH", kind, len(data)) + data.ljust(4, b"\0")
    return struct.pack("<II", kind, len(data)) + data + b"\0" * (-len(data) % 8)


def matrix(kind: int, shape: tuple[int, int], name: bytes, *parts: bytes) -> bytes:
    head = element(6, struct.pack("<II", kind, 0)) + element(5, struct.pack("<ii", *shape)) + element(1, name)
    return element(14, head + b"".join(parts))


def meta(numbered: list[tuple[int, str]], *, packs: bool) -> bytes:
    """What the development kit has in `meta.mat`."""
    names = b"".join(one.ljust(16, b"\0") for one in (b"ILSVRC2012_ID", b"WNID", b"words"))
    cells = b""
    for number, synset in numbered:
        cells += matrix(
            6, (1, 1), b"", element(2 if number < 256 else 4, struct.pack("<B" if number < 256 else "<H", number))
        )
        cells += matrix(4, (1, len(synset)), b"", element(4, synset.encode("utf-16-le")))
        cells += matrix(4, (1, 10), b"", element(16, b"some words"))
    whole = matrix(2, (len(numbered), 1), b"synsets", element(5, struct.pack("<i", 16)), element(1, names), cells)
    packed = zlib.compress(whole)
    return (
        b"MATLAB 5.0 MAT-file".ljust(124)
        + b"\x00\x01IM"
        + (struct.pack("<II", 15, len(packed)) + packed if packs else whole)
    )


def archive(path: Path | None, files: dict[str, bytes], mode: str = "w", *, into: io.BytesIO | None = None) -> None:
    with tarfile.open(path, mode, into) as held:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            held.addfile(member, io.BytesIO(data))


@pytest.mark.parametrize("packs", [False, True])
def test_synsets_are_read_from_files_of_matlab(packs: bool) -> None:
    pytest.importorskip("scipy.io", reason=NEEDS)
    raw = meta([(1, "n02"), (999, "n01")], packs=packs)
    assert synsets(raw) == {1: "n02", 999: "n01"}
    assert synsets(meta([(7, "n07")], packs=packs)) == {7: "n07"}
    for bad in (raw[:140], meta([], packs=packs)[:128], b"no file of MATLAB", b""):
        with pytest.raises(hpgo.errors.FileError, match=r"`meta.mat` has no readable structures `synsets`"):
            synsets(bad)


def test_imagenets_archives_are_read_as_they_were_published(tmp_path: Path) -> None:
    pytest.importorskip("scipy.io", reason=NEEDS)
    classes_of_kit = [(number, f"n{9999 - number:05}") for number in range(1, 1001)]  # the last one is the first class
    kit = {
        "ILSVRC2012_devkit_t12/data/meta.mat": meta([*classes_of_kit, (1001, "n00000")], packs=True),
        "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt": b"1000\n999\n1\n",
    }
    archive(tmp_path / "ILSVRC2012_devkit_t12.tar.gz", kit, "w:gz")
    images = {f"ILSVRC2012_val_0000000{at}.JPEG": b"image %d" % at for at in (3, 1, 2)}
    archive(tmp_path / "ILSVRC2012_img_val.tar", images)
    found = list(pictures(tmp_path, "val"))
    assert [one.read() for one in found] == [b"image 1", b"image 2", b"image 3"]
    assert [one.label for one in found] == [0, 1, 999]
    classes = {}
    for name in ("n02", "n01"):
        inner = io.BytesIO()
        archive(None, {f"{name}_{at}.JPEG": f"{name} {at}".encode() for at in (2, 1)}, into=inner)
        classes[f"{name}.tar"] = inner.getvalue()
    archive(tmp_path / "ILSVRC2012_img_train.tar", classes)
    found = list(pictures(tmp_path, "train"))
    assert [(one.read(), one.label) for one in found] == [
        (b"n01 1", 0), (b"n01 2", 0), (b"n02 1", 1), (b"n02 2", 1),
    ]  # fmt: skip
    (tmp_path / "val/n01").mkdir(parents=True)
    (tmp_path / "val/n01/x.JPEG").write_bytes(b"unpacked")
    assert [(one.read(), one.label) for one in pictures(tmp_path, "validation")] == [(b"unpacked", 0)]
    for split, words in (("test", "no split `test` with classes"), ("train", "img_train.tar")):
        with pytest.raises(hpgo.errors.FileError, match=words):
            list(pictures(tmp_path / "val", split))


def test_images_become_what_the_models_were_trained_on(tmp_path: Path) -> None:
    pil = pytest.importorskip("PIL.Image", reason="needs Pillow, as matplotlib does")
    held = io.BytesIO()
    pil.new("RGB", (300, 200), (255, 0, 51)).save(held, "PNG")
    plain = pixels(held.getvalue(), crops=False)
    assert plain.shape == (3, 224, 224)
    assert plain[:, 5, 7].tolist() == pytest.approx([1.0, -1.0, -0.6])
    cropped = pixels(held.getvalue(), crops=True)
    assert cropped[:, 5, 7].tolist() == pytest.approx([(1 - 0.485) / 0.229, -0.456 / 0.224, (0.2 - 0.406) / 0.225])
    with refused(hpgo.errors.FileError, "damaged_file"):
        pixels(b"no image", crops=False)
