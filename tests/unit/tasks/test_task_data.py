"""The loaders, on tiny files in every layout, and on the real data where it is at hand."""

from __future__ import annotations

import gzip
import io
import json
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from afl.core.randomness import Purpose, SharedRandomness
from afl.errors import ConfigError, DataError
from afl.tasks import Task, TaskContext, WorkerData
from afl.tasks import cifar10 as cifar10_module
from afl.tasks import fashion_mnist as fashion_mnist_module
from afl.tasks.cifar10 import Cifar10
from afl.tasks.data import images as images_module
from afl.tasks.data.leaf_files import CHARACTERS
from afl.tasks.digits import Digits
from afl.tasks.fashion_mnist import FashionMnist
from afl.tasks.femnist import Femnist

RANDOM = np.random.default_rng(0)


def parts(data: WorkerData) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert isinstance(data.train, tuple)
    assert isinstance(data.test, tuple)
    for inputs, labels in (data.train, data.test):
        assert inputs.dtype == torch.float32
        assert inputs.is_contiguous()
        assert labels.dtype == torch.int64
        assert len(inputs) == len(labels) > 0
    return (*data.train, *data.test)


def all_inputs(task: Task, context: TaskContext) -> Tensor:
    """Every worker's examples, whose single pixels tell the examples apart."""
    return torch.cat(
        [part for worker in range(context.workers) for part in parts(task.data(worker, context))[::2]]
    )


def with_workers(workers: int) -> TaskContext:
    return TaskContext(workers=workers, randomness=SharedRandomness.from_int(11))


class TestDigits:
    @pytest.mark.parametrize("workers", [2, 3, 10, 49, 50])
    def test_the_default_partition_fits_any_number_of_workers(self, workers: int) -> None:
        task, context = Digits(), with_workers(workers)
        assert len(all_inputs(task, context)) == 1797

    def test_ten_workers_have_the_papers_label_skew(self, context: TaskContext) -> None:
        task = Digits()
        for worker in range(10):
            _, train, _, test = parts(task.data(worker, context))
            labels = torch.cat([train, test])
            assert (labels == worker).float().mean() > 0.75
            assert len(test) == round(len(labels) / 5)

    def test_inputs_are_standardized_and_fit_the_model(self) -> None:
        task, context = Digits(partition="iid"), with_workers(2)
        inputs = all_inputs(task, context)
        assert inputs.shape == (1797, 1, 8, 8)
        assert inputs.mean().item() == pytest.approx(0, abs=1e-3)
        assert inputs.std().item() == pytest.approx(1, abs=1e-3)
        batch = task.data(0, context).test
        assert task.metrics(task.model(), batch)["accuracy"] <= 1

    def test_a_few_steps_learn(self) -> None:
        torch.manual_seed(0)
        task, context = Digits(partition="iid"), with_workers(2)
        data, model = task.data(0, context), task.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(60):
            optimizer.zero_grad()
            task.loss(model, data.train).backward()
            optimizer.step()
        assert task.metrics(model, data.test)["accuracy"] > 0.85


def idx(values: np.ndarray[Any, np.dtype[np.uint8]]) -> bytes:
    header = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
    return header + values.tobytes()


def write_fashion(folder: Path, prefix: str, count: int, *, packed: bool = True) -> np.ndarray[Any, Any]:
    images = RANDOM.integers(0, 256, (count, 28, 28), dtype=np.uint8)
    folder.mkdir(parents=True, exist_ok=True)
    for kind, values in (("images-idx3", images), ("labels-idx1", np.arange(count, dtype=np.uint8) % 10)):
        name, content = f"{prefix}-{kind}-ubyte", idx(values)
        (folder / (name + ".gz" * packed)).write_bytes(gzip.compress(content) if packed else content)
    return images


class TestFashionMnist:
    @pytest.fixture(autouse=True)
    def no_system_copy(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fashion_mnist_module, "_DEBIAN_FOLDER", tmp_path / "system")

    @pytest.mark.parametrize("packed", [True, False])
    @pytest.mark.parametrize("below", ["FashionMNIST/raw", "raw", ".", "../system"])
    def test_each_place_and_form_is_read(self, tmp_path: Path, below: str, *, packed: bool) -> None:
        own = tmp_path / "own"
        own.mkdir()
        images = write_fashion(own / below, "train", 50, packed=packed)
        inputs = all_inputs(FashionMnist(data_dir=own, partition="iid"), with_workers(3))
        brightness = (inputs * 0.3530 + 0.2860).mul(255).round().to(torch.uint8).squeeze(1).numpy()
        assert sorted(map(bytes, brightness)) == sorted(map(bytes, images))

    def test_the_pool_may_include_the_official_test_images(self, tmp_path: Path) -> None:
        write_fashion(tmp_path, "train", 50)
        write_fashion(tmp_path, "t10k", 20)
        for pool, count in (("train", 50), ("all", 70)):
            task = FashionMnist(data_dir=tmp_path, pool=pool, partition="iid")
            assert len(all_inputs(task, with_workers(4)).unique(dim=0)) == count

    def test_labels_stay_with_their_images(self, tmp_path: Path) -> None:
        folder = tmp_path / "raw"
        write_fashion(folder, "train", 100)
        write_fashion(folder, "t10k", 50)
        for prefix, count in (("train", 100), ("t10k", 50)):
            marked = (
                np.zeros((count, 28, 28), np.uint8) + (np.arange(count, dtype=np.uint8) % 10)[:, None, None]
            )
            (folder / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(marked)))
        task = FashionMnist(data_dir=tmp_path, pool="all")
        for worker in range(10):
            train_inputs, train, test_inputs, test = parts(task.data(worker, with_workers(10)))
            pixel = (torch.cat([train_inputs, test_inputs])[:, 0, 0, 0] * 0.3530 + 0.2860) * 255
            assert torch.equal(pixel.round().long(), torch.cat([train, test]))

    def test_missing_files_are_named_with_places_and_remedy(self, tmp_path: Path) -> None:
        with pytest.raises(DataError) as caught:
            FashionMnist(data_dir=tmp_path / "own").data(0, with_workers(10))
        for part in (
            "train-images-idx3-ubyte, train-labels-idx1-ubyte (each plain or .gz)",
            f"{tmp_path / 'own' / 'FashionMNIST' / 'raw'}, {tmp_path / 'own' / 'raw'}, {tmp_path / 'own'}, ",
            "https://github.com/zalandoresearch/fashion-mnist into",
            "--task-option download=true",
        ):
            assert part in str(caught.value)

    def test_another_number_of_workers_than_classes_is_refused(self, tmp_path: Path) -> None:
        write_fashion(tmp_path, "train", 50)
        with pytest.raises(ConfigError, match="4 workers and 10 classes"):
            FashionMnist(data_dir=tmp_path).data(0, with_workers(4))

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "not an IDX file"),
            (b"\x00\x00\x08\x03\x00\x00", "damaged: it ends inside its header"),
            (idx(np.zeros((49, 28, 28), np.uint8)), r"shape \(49, 28, 28\)"),
            (idx(np.zeros((50, 28, 28), np.uint8))[:-1], "damaged: 50 rows are announced"),
        ],
    )
    def test_damaged_files_are_named(self, tmp_path: Path, content: bytes, message: str) -> None:
        write_fashion(tmp_path, "train", 50, packed=False)
        (tmp_path / "train-images-idx3-ubyte").write_bytes(content)
        with pytest.raises(DataError, match=message):
            all_inputs(FashionMnist(data_dir=tmp_path, partition="iid"), with_workers(2))

    def test_a_cut_gzip_is_named(self, tmp_path: Path) -> None:
        write_fashion(tmp_path, "train", 50)
        file = tmp_path / "train-images-idx3-ubyte.gz"
        file.write_bytes(file.read_bytes()[:2000])
        with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz is damaged"):
            FashionMnist(data_dir=tmp_path, partition="iid").data(0, with_workers(2))

    def test_a_download_appears_whole_and_is_used(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fetch(root: str, *, download: bool) -> None:
            assert download
            assert not (tmp_path / "data" / "FashionMNIST").exists()
            write_fashion(Path(root) / "FashionMNIST" / "raw", "train", 50)

        monkeypatch.setattr(
            images_module, "require", lambda module, purpose: SimpleNamespace(FashionMNIST=fetch)
        )
        task = FashionMnist(data_dir=tmp_path / "data", download=True, partition="iid")
        assert len(all_inputs(task, with_workers(2))) == 50
        assert [entry.name for entry in (tmp_path / "data").iterdir()] == ["FashionMNIST"]

    def test_a_failed_download_is_explained(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fetch(root: str, *, download: bool) -> None:
            raise RuntimeError("no route to host")

        monkeypatch.setattr(
            images_module, "require", lambda module, purpose: SimpleNamespace(FashionMNIST=fetch)
        )
        with pytest.raises(DataError, match=r"could not download FashionMNIST into .*no route to host"):
            FashionMnist(data_dir=tmp_path, download=True).data(0, with_workers(10))
        assert not list(tmp_path.iterdir())

    def test_the_real_data_is_the_papers_partition(self, shared_data: Path, context: TaskContext) -> None:
        task = FashionMnist(data_dir=shared_data)
        train_inputs, train, _, test = parts(task.data(3, context))
        assert (len(train), len(test)) == (4800, 1200)
        assert int((torch.cat([train, test]) == 3).sum()) == 4800
        assert train_inputs.shape == (4800, 1, 28, 28)
        model = task.model()
        assert sum(parameter.numel() for parameter in model.parameters()) == 235_914
        assert task.metrics(model, task.data(3, context).test)["loss"].isfinite()


CIFAR_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def cifar_images(count: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    images = RANDOM.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
    images[:, 0, 0] = (np.arange(count) % 10)[:, None]
    return images


def write_cifar_folders(folder: Path, images: np.ndarray[Any, np.dtype[np.uint8]], split: str) -> None:
    image_module = pytest.importorskip("PIL.Image")
    for number, image in enumerate(images):
        place = folder / split / CIFAR_CLASSES[number % 10]
        place.mkdir(parents=True, exist_ok=True)
        image_module.fromarray(image).save(place / f"{number:05d}.png")


def write_cifar_npz(folder: Path, images: np.ndarray[Any, np.dtype[np.uint8]], split: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / f"{split}.npz", images=images, labels=np.arange(len(images)) % 10)


class TestCifar10:
    @pytest.mark.parametrize("write", [write_cifar_folders, write_cifar_npz])
    @pytest.mark.parametrize("below", ["cifar10", "."])
    def test_each_layout_is_read(self, tmp_path: Path, below: str, write: Callable[..., None]) -> None:
        write(tmp_path / below, cifar_images(60), "train")
        write(tmp_path / below, cifar_images(20), "test")
        for pool, count in (("train", 60), ("all", 80)):
            task = Cifar10(data_dir=tmp_path, pool=pool, partition="iid")
            inputs = all_inputs(task, with_workers(3))
            assert inputs.shape == (count, 3, 32, 32)
            assert len(inputs.unique(dim=0)) == count
            x, y, _, _ = parts(task.data(2, with_workers(3)))
            assert torch.equal(((x[:, 0, 0, 0] * 0.2470 + 0.4914) * 255).round().long(), y)
            assert torch.equal(((x[:, 2, 0, 0] * 0.2616 + 0.4465) * 255).round().long(), y)

    def test_missing_files_are_named_with_places_and_remedy(self, tmp_path: Path) -> None:
        with pytest.raises(DataError) as caught:
            Cifar10(data_dir=tmp_path, pool="all").data(0, with_workers(10))
        for part in (
            "train/<class>/*.png, test/<class>/*.png, train.npz, test.npz, ",
            ", cifar10-train.npz, cifar10-test.npz, cifar-10-batches-py in ",
            f" in {tmp_path / 'cifar10'}, {tmp_path}.",
            "https://www.cs.toronto.edu/~kriz/cifar.html and unpack it into",
        ):
            assert part in str(caught.value)

    def test_wrong_files_are_named(self, tmp_path: Path) -> None:
        (tmp_path / "cifar-10-batches-py").mkdir()
        with pytest.raises(DataError, match=r"cifar-10-batches-py is incomplete or damaged"):
            Cifar10(data_dir=tmp_path).data(0, with_workers(10))
        np.savez(tmp_path / "train.npz", pixels=np.zeros(3, np.uint8), labels=np.zeros(3))
        with pytest.raises(DataError, match=r"train\.npz has no array images; it holds pixels, labels"):
            Cifar10(data_dir=tmp_path).data(0, with_workers(10))
        np.savez(tmp_path / "train.npz", images=np.zeros((3, 2), np.uint8), labels=np.zeros(3))
        with pytest.raises(DataError, match=r"uint8 \(3, 32, 32, 3\) is needed"):
            Cifar10(data_dir=tmp_path).data(0, with_workers(10))
        np.savez(tmp_path / "train.npz", images=np.array([None]), labels=np.zeros(3))
        with pytest.raises(DataError, match="no Python objects"):
            Cifar10(data_dir=tmp_path).data(0, with_workers(10))
        (tmp_path / "train.npz").write_bytes(b"PK")
        with pytest.raises(DataError, match=r"train\.npz is damaged"):
            Cifar10(data_dir=tmp_path).data(0, with_workers(10))
        (tmp_path / "train").mkdir()
        with pytest.raises(DataError, match="0 class folders"):
            Cifar10(data_dir=tmp_path).data(0, with_workers(10))


class TestCifar10InSheets:
    @staticmethod
    def write(folder: Path, images: np.ndarray[Any, np.dtype[np.uint8]], split: str) -> None:
        image_module = pytest.importorskip("PIL.Image")
        sheets = []
        for start in range(0, len(images), 100):
            sheet = images[start : start + 100].reshape(10, 10, 32, 32, 3).transpose(0, 2, 1, 3, 4)
            packed = io.BytesIO()
            image_module.fromarray(sheet.reshape(320, 320, 3)).save(packed, "WEBP", lossless=True)
            sheets.append(packed.getvalue())
        np.savez(
            folder / f"cifar10-{split}.npz",
            webp=np.frombuffer(b"".join(sheets), np.uint8),
            offsets=np.cumsum([0, *map(len, sheets)]),
            labels=np.arange(len(images)) % 10,
        )

    def test_sheets_give_what_an_array_gives(self, tmp_path: Path) -> None:
        sheets, arrays = tmp_path / "sheets", tmp_path / "arrays"
        sheets.mkdir()
        for split, count in (("train", 300), ("test", 100)):
            images = cifar_images(count)
            self.write(sheets, images, split)
            write_cifar_npz(arrays, images, split)
        found, right = (Cifar10(data_dir=folder, pool="all") for folder in (sheets, arrays))
        # The third call takes its images from those that the second kept.
        for worker in (4, 0, 9):
            for mine, theirs in zip(
                parts(found.data(worker, with_workers(10))),
                parts(right.data(worker, with_workers(10))),
                strict=True,
            ):
                assert torch.equal(mine, theirs)

    def test_wrong_sheets_are_named(self, tmp_path: Path) -> None:
        self.write(tmp_path, cifar_images(200), "train")
        stored = dict(np.load(tmp_path / "cifar10-train.npz"))
        np.savez(tmp_path / "cifar10-train.npz", **{**stored, "labels": stored["labels"][:-1]})
        with pytest.raises(DataError, match="2 sheets of 100 images but 199 labels"):
            Cifar10(data_dir=tmp_path).data(0, with_workers(10))
        np.savez(tmp_path / "cifar10-train.npz", **{**stored, "webp": stored["webp"][::-1]})
        with pytest.raises(DataError, match=r"sheet \d cannot be read as an image"):
            Cifar10(data_dir=tmp_path).data(0, with_workers(10))
        (tmp_path / "cifar10-train.npz").write_bytes(b"PK")
        with pytest.raises(DataError, match=r"cifar10-train\.npz is damaged"):
            Cifar10(data_dir=tmp_path).data(0, with_workers(10))

    @pytest.mark.slow  # it decodes all 60,000 images
    def test_the_real_sheets(self, shared_data: Path, context: TaskContext) -> None:
        inputs, labels, test_inputs, test = parts(Cifar10(data_dir=shared_data).data(1, context))
        assert (len(labels), len(test)) == (4000, 1000)
        assert int((torch.cat([labels, test]) == 1).sum()) == 4000
        # Standardized with the whole set's mean and deviation; this worker has mostly cars.
        assert abs(float(torch.cat([inputs, test_inputs]).mean())) < 0.2


class TestCifar10OfTorchvision:
    def test_the_official_files_are_left_to_torchvision(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        images = cifar_images(60)

        def cifar10(root: str, *, train: bool = True, download: bool = False) -> SimpleNamespace:
            if download:
                (Path(root) / "cifar-10-batches-py").mkdir()
            assert (Path(root) / "cifar-10-batches-py").is_dir()
            rows = slice(0, 40) if train else slice(40, 60)
            return SimpleNamespace(data=images[rows], targets=(np.arange(60) % 10)[rows].tolist())

        for module in (cifar10_module, images_module):
            monkeypatch.setattr(module, "require", lambda name, purpose: SimpleNamespace(CIFAR10=cifar10))
        task = Cifar10(data_dir=tmp_path, download=True, pool="all", partition="dirichlet", alpha=10)
        inputs = all_inputs(task, with_workers(4))
        assert len(inputs.unique(dim=0)) == 60
        x, y, _, _ = parts(task.data(2, with_workers(4)))
        assert torch.equal(((x[:, 0, 0, 0] * 0.2470 + 0.4914) * 255).round().long(), y)
        assert [entry.name for entry in tmp_path.iterdir()] == ["cifar-10-batches-py"]


WRITERS = ["f01"] * 7 + ["f02"] * 11 + ["f03"] * 3 + ["f04"] * 11


def femnist_images() -> tuple[np.ndarray[Any, np.dtype[np.uint8]], np.ndarray[Any, np.dtype[np.int64]]]:
    """White paper with a few dark pixels; the first pixel is the label."""
    images = RANDOM.integers(200, 256, (len(WRITERS), 28, 28), dtype=np.uint8)
    labels = np.arange(len(WRITERS), dtype=np.int64) % 62
    images[:, 0, 0] = labels
    return images, labels


def leaf_document(rows: np.ndarray[Any, Any], indent: int | None) -> str:
    images, labels = femnist_images()
    users = sorted({WRITERS[row] for row in rows})
    own = {user: [row for row in rows if WRITERS[row] == user] for user in users}
    data = {
        user: {
            "x": [(images[row] / 255).reshape(-1).tolist() for row in own[user]],
            "y": labels[own[user]].tolist(),
        }
        for user in users
    }
    document = {"users": users, "num_samples": [len(own[user]) for user in users], "user_data": data}
    return json.dumps(document, indent=indent)


def write_leaf_whole(folder: Path) -> None:
    place = folder / "femnist" / "data" / "all_data"
    place.mkdir(parents=True)
    (place / "all_data_0.json").write_text(leaf_document(np.arange(18), None))
    (place / "all_data_1.json").write_text(leaf_document(np.arange(18, 32), 1))


def write_leaf_split(folder: Path) -> None:
    rows = np.arange(32)
    for split, chosen in (("train", rows[rows % 4 != 0]), ("test", rows[rows % 4 == 0])):
        place = folder / "femnist" / split
        place.mkdir(parents=True)
        (place / f"{split}.json").write_text(leaf_document(chosen, None))


def write_parquet(folder: Path, images: list[Any], labels: list[Any], names: tuple[str, str, str]) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (folder / "femnist").mkdir()
    for number, rows in enumerate((slice(0, 20), slice(20, 32))):
        columns = dict(zip(names, (images[rows], labels[rows], WRITERS[rows]), strict=True))
        parquet.write_table(
            arrow.table(columns), folder / "femnist" / f"train-{number}.parquet", row_group_size=5
        )


def png(image: np.ndarray[Any, np.dtype[np.uint8]]) -> bytes:
    image_module = pytest.importorskip("PIL.Image")
    stream = io.BytesIO()
    image_module.fromarray(image).save(stream, format="PNG")
    return stream.getvalue()


def write_parquet_encoded(folder: Path) -> None:
    images, labels = femnist_images()
    content = [{"bytes": png(image), "path": None} for image in images]
    write_parquet(folder, content, labels.tolist(), ("image", "character", "writer_id"))


def write_parquet_bytes(folder: Path) -> None:
    images, labels = femnist_images()
    characters = [CHARACTERS[label] for label in labels]
    write_parquet(folder, [png(image) for image in images], characters, ("image", "label", "writer"))


def write_parquet_numbers(folder: Path) -> None:
    images, labels = femnist_images()
    write_parquet(folder, images.reshape(-1, 784).tolist(), labels.tolist(), ("image", "label", "writer_id"))


def write_parquet_floats(folder: Path) -> None:
    images, labels = femnist_images()
    floats = (images.reshape(-1, 784) / 255).tolist()
    write_parquet(folder, floats, labels.tolist(), ("image", "label", "writer_id"))


def write_femnist_npz(folder: Path) -> None:
    images, labels = femnist_images()
    np.savez_compressed(folder / "femnist.npz", images=images, labels=labels, writer=np.array(WRITERS))


LAYOUTS = [
    write_leaf_whole,
    write_leaf_split,
    write_parquet_encoded,
    write_parquet_bytes,
    write_parquet_numbers,
    write_parquet_floats,
    write_femnist_npz,
]


def first_pixel(inputs: Tensor) -> Tensor:
    ink = inputs[:, 0, 0, 0] * 0.1641 + 0.0385
    return ((1 - ink) * 255).round().long()


class TestFemnist:
    @pytest.mark.parametrize("write", LAYOUTS)
    def test_each_layout_gives_the_largest_writers_their_own(
        self, tmp_path: Path, write: Callable[[Path], None]
    ) -> None:
        write(tmp_path)
        task, context = Femnist(data_dir=tmp_path, hidden=8), with_workers(3)
        for worker, writer in enumerate(["f02", "f04", "f01"]):
            train_inputs, train, test_inputs, test = parts(task.data(worker, context))
            inputs, labels = torch.cat([train_inputs, test_inputs]), torch.cat([train, test])
            assert sorted(labels.tolist()) == [row for row in range(32) if WRITERS[row] == writer]
            assert torch.equal(first_pixel(inputs), labels)
            assert inputs.shape[1:] == (1, 28, 28)
        assert task.metrics(task.model(), task.data(0, context).test)["loss"].isfinite()

    @pytest.mark.parametrize("write", LAYOUTS)
    @pytest.mark.parametrize("partition", ["iid", "dirichlet"])
    def test_each_layout_can_be_divided_otherwise(
        self, tmp_path: Path, write: Callable[[Path], None], partition: str
    ) -> None:
        write(tmp_path)
        task, context = Femnist(data_dir=tmp_path, partition=partition, alpha=50), with_workers(2)
        seen: list[int] = []
        for worker in range(2):
            train_inputs, train, test_inputs, test = parts(task.data(worker, context))
            labels = torch.cat([train, test])
            assert torch.equal(first_pixel(torch.cat([train_inputs, test_inputs])), labels)
            seen += labels.tolist()
        assert sorted(seen) == list(range(32))

    def test_a_named_file_is_read(self, tmp_path: Path) -> None:
        write_femnist_npz(tmp_path)
        (tmp_path / "femnist.npz").rename(tmp_path / "other.npz")
        parts(Femnist(data_dir=tmp_path, file="other.npz").data(0, with_workers(1)))
        with pytest.raises(DataError, match=r"looked for .*gone\.npz"):
            Femnist(data_dir=tmp_path, file="gone.npz").data(0, with_workers(1))

    def test_too_many_workers_or_too_few_classes_are_refused(self, tmp_path: Path) -> None:
        write_femnist_npz(tmp_path)
        with pytest.raises(ConfigError, match="4 writers and the run 5 workers"):
            Femnist(data_dir=tmp_path).data(0, with_workers(5))
        with pytest.raises(DataError, match=r"labels from 7 to 17; the model has 10 classes"):
            Femnist(data_dir=tmp_path, classes=10).data(0, with_workers(2))

    def test_labels_beyond_the_classes_are_not_dropped_by_a_partition(self, tmp_path: Path) -> None:
        write_femnist_npz(tmp_path)
        with pytest.raises(DataError, match="labels from 0 to 31, but the task has 10 classes"):
            Femnist(data_dir=tmp_path, classes=10, partition="dirichlet").data(0, with_workers(2))

    def test_the_wrong_ink_is_noticed(self, tmp_path: Path) -> None:
        write_femnist_npz(tmp_path)
        with pytest.raises(ConfigError, match="mostly light, so their ink is dark; set ink: dark"):
            Femnist(data_dir=tmp_path, ink="light").data(0, with_workers(2))

    def test_missing_files_are_named_with_places_and_remedy(self, tmp_path: Path) -> None:
        with pytest.raises(DataError) as caught:
            Femnist(data_dir=tmp_path).data(0, with_workers(2))
        for part in (f"{tmp_path / 'femnist'}, {tmp_path / 'femnist.npz'}", "TalwalkarLab/leaf", "all_data"):
            assert part in str(caught.value)

    @pytest.mark.parametrize(
        ("document", "message"),
        [
            ("", "is empty"),
            ("{}", "no 'users'"),
            ('{"users": ["a"], "num_samples": []}', "1 users but 0 num_samples"),
            ('{"users": ["a"], "num_samples": [2]}', "no 'user_data'"),
            ('{"users": ["a"], "num_samples": [2], "user_data": {"b": {}}}', "no user_data of user a"),
            ('{"users": ["a"', "users is not a list"),
            (
                '{"users": ["a"], "num_samples": [2], "user_data": {"a": {"y": [1], "x": []}}}',
                r"y of user a has",
            ),
            (
                '{"users": ["a"], "num_samples": [2], "user_data": {"a": {"y": [1, 2], "x": [[1], 2]}}}',
                "x of user a",
            ),
            (
                '{"users": ["a"], "num_samples": [2], "user_data": {"a": {"y": [1, 2]',
                "not in LEAF's|not a list",
            ),
        ],
    )
    def test_wrong_json_is_named(self, tmp_path: Path, document: str, message: str) -> None:
        (tmp_path / "femnist.json").write_text(document)
        with pytest.raises(DataError, match=message):
            Femnist(data_dir=tmp_path).data(0, with_workers(1))

    def test_wrong_parquet_is_named(self, tmp_path: Path) -> None:
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        cases: list[tuple[dict[str, list[Any]], str]] = [
            ({}, "no column character or label; it has"),
            ({"label": ["&"] * 2}, "label '&' is"),
            ({"label": [1, 2]}, "an image that cannot be read"),
        ]
        for labels, message in cases:
            columns = {"writer": ["a"] * 2, "image": [b"no image"] * 2, **labels}
            parquet.write_table(arrow.table(columns), tmp_path / "femnist.parquet")
            with pytest.raises(DataError, match=message):
                Femnist(data_dir=tmp_path).data(0, with_workers(1))

    def test_the_real_writers(self, shared_data: Path) -> None:
        task, context = Femnist(data_dir=shared_data, hidden=32), with_workers(20)
        inputs, labels, _, test = parts(task.data(19, context))
        assert len(labels) + len(test) >= 181
        assert inputs.mean().abs() < 0.5
        assert nn.functional.cross_entropy(task.model()(inputs), labels).isfinite()

    def test_the_real_digits_by_writer(self, shared_data: Path) -> None:
        task = Femnist(
            data_dir=shared_data,
            file="sd19-digits-by-writer.npz",
            classes=10,
            ink="light",
            mean=0.1309,
            std=0.3084,
        )
        _, labels, _, test = parts(task.data(499, with_workers(500)))
        assert len(labels) + len(test) == 95


def test_partitions_do_not_depend_on_who_asks(tmp_path: Path) -> None:
    write_fashion(tmp_path, "train", 100)
    one, other = (FashionMnist(data_dir=tmp_path) for _ in range(2))
    for worker in (5, 0, 9):
        one.data(worker, with_workers(10))
    for mine, theirs in zip(
        parts(one.data(3, with_workers(10))), parts(other.data(3, with_workers(10))), strict=True
    ):
        assert torch.equal(mine, theirs)
    again = TaskContext(workers=10, randomness=SharedRandomness.from_int(12))
    assert not torch.equal(parts(one.data(3, again))[0], parts(other.data(3, with_workers(10)))[0])


class TestEvaluationOnValidation:
    def test_it_holds_out_a_fifth_of_the_training_part_and_never_shows_the_test_part(
        self, context: TaskContext
    ) -> None:
        right, task = Digits(), Digits(evaluate_on="validation")
        for worker in range(10):
            train, train_labels, test, _ = parts(right.data(worker, context))
            fitted, fitted_labels, held_out, held_out_labels = parts(task.data(worker, context))
            assert len(held_out) == round(len(train) / 5)
            assert sorted(torch.cat([fitted, held_out]).flatten(1).tolist()) == sorted(
                train.flatten(1).tolist()
            )
            assert torch.equal(
                torch.cat([fitted_labels, held_out_labels]).bincount(minlength=10),
                train_labels.bincount(minlength=10),
            )
            # Digits are distinct images, so no test image is among those seen.
            seen = {tuple(row) for row in torch.cat([fitted, held_out]).flatten(1).tolist()}
            assert not seen & {tuple(row) for row in test.flatten(1).tolist()}

    def test_the_held_out_part_is_not_the_split_repeated(self, context: TaskContext) -> None:
        """A stream of its own: places in the training part are not those of the test part."""
        train, _, _, _ = parts(Digits().data(0, context))
        fitted, _, _, _ = parts(Digits(evaluate_on="validation").data(0, context))
        order = context.randomness.stream(Purpose.TRAIN_TEST_SPLIT, worker=0).permutation(len(train))
        repeated = train[torch.from_numpy(np.sort(order[(len(train) + 2) // 5 :]))]
        assert len(repeated) == len(fitted)
        assert not torch.equal(repeated, fitted)

    @pytest.mark.parametrize("task", [Digits, FashionMnist, Cifar10, Femnist])
    def test_every_image_task_takes_it(self, task: Callable[..., Task]) -> None:
        task(evaluate_on="validation", data_seed=3)
        with pytest.raises(ConfigError, match="evaluate_on"):
            task(evaluate_on="train")


def test_a_seed_of_the_data_fixes_partition_and_splits() -> None:
    one, other = (TaskContext(10, SharedRandomness.from_int(seed)) for seed in (1, 2))
    for options in ({}, {"evaluate_on": "validation"}):
        task = Digits(data_seed=5, **options)
        for mine, theirs in zip(parts(task.data(4, one)), parts(task.data(4, other)), strict=True):
            assert torch.equal(mine, theirs)
        as_seeded = Digits(**options).data(4, TaskContext(10, SharedRandomness.from_int(5)))
        assert torch.equal(parts(as_seeded)[2], parts(task.data(4, one))[2])
    assert not torch.equal(parts(Digits().data(4, one))[0], parts(Digits().data(4, other))[0])
