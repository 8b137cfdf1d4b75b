"""ImageNet's folders, labels and augmentation, on small files of exactly that layout."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torchvision.transforms import RandomResizedCrop, v2

from pipebench import zoo
from pipebench.zoo import imagenet as module
from pipebench.zoo.imagenet import PIXEL_MEAN, PIXEL_STD, ImageNet, generator_of, imagenet, random_crop
from pipebench.zoo.registry import DataError

CLASSES = ("n01440764", "n01443537", "n02102040")


def picture(size: tuple[int, int], seed: int) -> Image.Image:
    """Return smooth noise, so that JPEG keeps it: width x height."""
    coarse = torch.rand(1, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
    smooth = torch.nn.functional.interpolate(coarse, (size[1], size[0]), mode="bilinear")[0]
    return v2.functional.to_pil_image(smooth)


def write_tree(root: Path, train_per_class: int = 3, eval_per_class: int = 2) -> None:
    for split, number in (("train", train_per_class), ("val", eval_per_class)):
        for label, name in enumerate(CLASSES):
            folder = root / split / name
            folder.mkdir(parents=True)
            for index in range(number):
                size = (40 + 8 * label, 36 + 6 * index)
                picture(size, 100 * label + index).save(folder / f"{name}_{index}.JPEG", quality=95)


def small(root: Path | str, **options: Any) -> ImageNet:
    sizes = {"num_train": 9, "num_eval": 6, "num_classes": 3, "image_size": 24, "resize_size": 28}
    return imagenet(root=str(root), **{**sizes, **options})


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    write_tree(tmp_path)
    return tmp_path


def test_published_sizes_need_no_data() -> None:
    dataset = zoo.DATASETS["imagenet"].make()
    assert (dataset.num_train, dataset.num_eval, dataset.num_classes) == (1_281_167, 50_000, 1000)
    assert dataset.loader_processes == 4
    fields = dataset.example(64)
    assert {name: (tuple(value.shape), value.is_meta) for name, value in fields.items()} == {
        "image": ((64, 3, 224, 224), True),
        "label": ((64,), True),
    }


def test_labels_are_positions_of_class_folders_and_decode_nothing(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = small(tree)
    dataset.check()
    monkeypatch.setattr(module, "_decoded", lambda path: pytest.fail(f"decoded {path}"))
    assert dataset.fetch("train", range(9), ["label"])["label"].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert dataset.fetch("eval", [5, 0, 3], ["label"])["label"].tolist() == [2, 0, 1]


def test_evaluation_equals_torchvision_s_resize_crop_and_normalisation(tree: Path) -> None:
    reference = v2.Compose(
        [
            v2.Resize(28, antialias=True),
            v2.CenterCrop(24),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(list(PIXEL_MEAN), list(PIXEL_STD)),
        ]
    )
    images = small(tree).fetch("eval", [1, 4], ["image"])["image"]
    for row, name in enumerate([f"{CLASSES[0]}/{CLASSES[0]}_1", f"{CLASSES[2]}/{CLASSES[2]}_0"]):
        with Image.open(tree / "val" / f"{name}.JPEG") as found:
            expected = reference(found.convert("RGB"))
        torch.testing.assert_close(images[row], expected, rtol=0, atol=1e-6)


def test_augmentation_equals_torchvision_s_crop_and_flip_at_the_drawn_values(tree: Path) -> None:
    images = small(tree).fetch("train", range(9), ["image"], draw=5)["image"]
    flips = []
    for index in range(9):
        label, number = divmod(index, 3)
        with Image.open(tree / "train" / CLASSES[label] / f"{CLASSES[label]}_{number}.JPEG") as found:
            whole = v2.functional.pil_to_tensor(found)
            generator = generator_of(5, index)
            top, left, height, width = random_crop(found.height, found.width, generator)
            part = v2.functional.to_pil_image(whole[:, top : top + height, left : left + width])
        flips.append(torch.rand((), generator=generator).item() < 0.5)
        expected = v2.functional.pil_to_tensor(v2.functional.resize(part, [24, 24], antialias=True)).float() / 255
        expected = expected.flip(-1) if flips[-1] else expected
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (PIXEL_MEAN, PIXEL_STD))
        torch.testing.assert_close(images[index], (expected - mean) / std, rtol=0, atol=1e-5)
    assert len(set(flips)) == 2


def test_a_sample_depends_on_its_index_and_the_draw_only(tree: Path) -> None:
    dataset = small(tree)
    torch.manual_seed(1)
    together = dataset.fetch("train", [7, 2, 4], ["image"], draw=3)["image"]
    torch.manual_seed(2)
    state = torch.random.get_rng_state()
    for row, index in enumerate([7, 2, 4]):
        alone = dataset.fetch("train", [index], ["image"], draw=3)["image"]
        assert torch.equal(alone[0], together[row])
    assert torch.equal(state, torch.random.get_rng_state())  # nothing global is drawn from
    assert not torch.equal(dataset.fetch("train", [7], ["image"], draw=4)["image"][0], together[0])
    again = [dataset.fetch("eval", [0], ["image"], draw=draw)["image"] for draw in (0, 1)]
    assert torch.equal(*again)


def test_loader_processes_see_the_same_pixels(tree: Path) -> None:
    """The data set goes to other processes pickled: small, without the listing, whatever was fetched before."""
    dataset = small(tree)
    here = dataset.fetch("train", range(9), ["image"], draw=1)["image"]
    sent = pickle.dumps(dataset)
    assert len(sent) < 1000
    module._listings.cache_clear()
    assert torch.equal(pickle.loads(sent).fetch("train", range(9), ["image"], draw=1)["image"], here)


def test_folders_are_listed_once(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million files take minutes on a network's disk; loader processes inherit the listing."""
    scanned: list[str] = []

    def scan(folder: Path) -> module.Listing:
        scanned.append(folder.name)
        return listed(folder)

    listed = module._scan
    monkeypatch.setattr(module, "_scan", scan)
    dataset = small(tree)
    dataset.check()
    for split in ("train", "eval"):
        dataset.fetch(split, [0], ["label"])
    assert scanned == ["train", "val"]
    module._listings.cache_clear()
    dataset.fetch("train", [0], ["label"])
    assert scanned[2:] == ["train", "val"]
    (tree / "train" / CLASSES[0] / "another.png").write_bytes(b"")
    with pytest.raises(ValueError, match=r"num_train is 9, but .* holds 10"):
        dataset.check()


def test_crops_have_the_published_areas_and_ratios() -> None:
    """And the means and spreads of torchvision's, which draws from the global generator."""
    crops = [random_crop(375, 500, generator_of(0, index)) for index in range(2000)]
    for top, left, height, width in crops:
        assert 0 <= top <= 375 - height
        assert 0 <= left <= 500 - width
        assert 0.079 < height * width / (375 * 500) <= 1
        assert 0.745 < width / height < 1.345
    torch.manual_seed(0)
    blank = torch.empty(3, 375, 500)
    theirs = [RandomResizedCrop.get_params(blank, [0.08, 1.0], [3 / 4, 4 / 3]) for _ in range(2000)]
    for mine, reference in zip(torch.tensor(crops).double().T, torch.tensor(theirs).double().T, strict=True):
        assert mine.mean().item() == pytest.approx(reference.mean().item(), rel=0.06)
        assert mine.std().item() == pytest.approx(reference.std().item(), rel=0.06)


@pytest.mark.parametrize(("size", "expected"), [((1000, 100), (433, 0, 133, 100)), ((100, 1000), (0, 433, 100, 133))])
def test_images_too_narrow_for_any_crop_give_their_middle(
    size: tuple[int, int], expected: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CROP_AREAS", (0.99, 1.0))
    assert random_crop(*size, generator_of(0, 0)) == expected


def test_grey_and_png_files_are_read(tmp_path: Path) -> None:
    write_tree(tmp_path, 1, 1)
    folder = tmp_path / "val" / CLASSES[0]
    picture((40, 40), 1).convert("L").save(folder / f"{CLASSES[0]}_0.JPEG")
    picture((40, 40), 1).convert("CMYK").save(folder / f"{CLASSES[0]}_1.JPEG")
    picture((40, 40), 1).save(folder / f"{CLASSES[0]}_2.png")
    dataset = small(tmp_path, num_train=3, num_eval=5)
    dataset.check()
    images = dataset.fetch("eval", [0, 1, 2], ["image"])["image"]
    assert images.isfinite().all()
    grey = images[0] * torch.tensor(PIXEL_STD).view(3, 1, 1) + torch.tensor(PIXEL_MEAN).view(3, 1, 1)
    torch.testing.assert_close(grey[0], grey[2])


@pytest.mark.parametrize("is_torn", [True, False], ids=["torn", "huge"])
def test_an_unreadable_image_is_named(is_torn: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tree(tmp_path, 1, 1)
    broken = tmp_path / "val" / CLASSES[1] / f"{CLASSES[1]}_0.JPEG"
    if is_torn:
        broken.write_bytes(b"not an image")
    else:
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1)  # Pillow refuses two times as many, as a bomb
    with pytest.raises(DataError, match=rf"^imagenet: .*{CLASSES[1]}_0.JPEG can't be read as an image"):
        small(tmp_path).fetch("eval", [1], ["image"])


def test_a_missing_root_is_reported_with_both_ways_to_set_it(monkeypatch: pytest.MonkeyPatch, tree: Path) -> None:
    monkeypatch.delenv("PIPEBENCH_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match=r"imagenet: .*root.*PIPEBENCH_DATA"):
        small("").check()
    monkeypatch.setenv("PIPEBENCH_DATA", str(tree))
    with pytest.raises(FileNotFoundError, match="imagenet"):
        small("").check()
    (tree / "imagenet").mkdir()
    for split in ("train", "val"):
        (tree / split).rename(tree / "imagenet" / split)
    small("").check()


def test_missing_layouts_say_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"expected are .*/train/<class>/\*.JPEG .* there is no folder .*/train"
    ):
        small(tmp_path).check()
    (tmp_path / "train").mkdir()
    picture((40, 40), 1).save(tmp_path / "train" / "a.JPEG")
    with pytest.raises(FileNotFoundError, match="has no class folders; move its images into one folder per class"):
        small(tmp_path).check()
    (tmp_path / "train" / CLASSES[0]).mkdir()
    with pytest.raises(FileNotFoundError, match=f"but .*{CLASSES[0]} has no images"):
        small(tmp_path).check()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_train": 10}, "num_train is 10, but .* holds 9: set it so"),
        ({"num_eval": 5}, "num_eval is 5, but .* holds 6: set it so"),
        ({"num_classes": 1000}, "num_classes is 1000, but .* holds 3: set it so"),
    ],
)
def test_other_sizes_name_the_option(tree: Path, options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(tree, **options).check()


def test_splits_with_other_classes(tree: Path) -> None:
    (tree / "val" / CLASSES[2]).rename(tree / "val" / "n09999999")
    with pytest.raises(ValueError, match=r"but n02102040 is in one of them only \(2 such folders\)"):
        small(tree).check()


@pytest.mark.parametrize(
    "options", [{"image_size": 0}, {"resize_size": 223}, {"loader_processes": -1}, {"num_train": 0}, {"num_classes": 0}]
)
def test_options_out_of_range(options: dict[str, int]) -> None:
    name, value = next(iter(options.items()))
    with pytest.raises(ValueError, match=f"^imagenet: {name} is {value}, allowed is"):
        zoo.DATASETS["imagenet"].make(**options)


def test_unknown_split_and_sample(tree: Path) -> None:
    with pytest.raises(ValueError, match="split is 'val', allowed are train, eval"):
        small(tree).fetch("val", [0], ["label"])
    with pytest.raises(IndexError, match="there is no sample 6"):
        small(tree).fetch("eval", [6], ["label"])


def test_scores_count_top1_and_top5_of_the_main_logits() -> None:
    logits = torch.arange(10.0).repeat(3, 1)
    targets = {"label": torch.tensor([9, 5, 4])}
    for output in (logits, (logits, -logits)):
        scores = small("", num_classes=10).score(output, targets)
        assert {name: value.item() for name, value in scores.items()} == {"top1": 1, "top5": 2}


def test_data_of_five_classes_has_no_top5() -> None:
    """It would be 1 for every model."""
    data = small("", num_classes=5)
    scores = data.score(torch.arange(5.0).repeat(2, 1), {"label": torch.tensor([4, 0])})
    assert {name: value.item() for name, value in scores.items()} == {"top1": 1}
    assert [*data.metrics] == ["top1"]
    assert [*small("", num_classes=6).metrics] == ["top1", "top5"]
