"""Samples through a real DataLoader: with workers and prefetch, only what was used counts."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from basilica.progress.samples import Samples


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        return index


def samples(rank: int = 0, world: int = 1, **options: Any) -> Samples:
    return Samples(100, 8, rank=rank, world=world, **options)


def lists(batches: Iterator[torch.Tensor]) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


@pytest.mark.parametrize("workers", [0, 2])
def test_what_was_fetched_ahead_is_not_used(workers: int) -> None:
    cursor = samples()
    expected = list(samples())
    loader = DataLoader(Numbers(), batch_sampler=cursor.batch_sampler(), num_workers=workers)
    batches = iter(loader)
    for number in range(3):
        assert next(batches).tolist() == expected[number]
        assert cursor.step == number
        cursor.advance()
    assert cursor.step == 3
    del batches
    restored = samples()
    restored.load_state_dict(cursor.state_dict())
    again = DataLoader(Numbers(), batch_sampler=restored.batch_sampler(), num_workers=workers)
    assert lists(iter(again)) == expected[3:]


def test_a_pass_over_a_batch_sampler_is_one_epoch() -> None:
    cursor = samples(epochs=2)
    loader = DataLoader(Numbers(), batch_sampler=cursor.batch_sampler())
    assert len(loader) == len(cursor) == 13
    seen: list[list[int]] = []
    while cursor.remaining:
        for batch in loader:
            seen.append(batch.tolist())
            cursor.advance()
        assert len(seen) == 13 * cursor.epoch
    assert seen == list(samples(epochs=2))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_counts_what_it_has_delivered(workers: int) -> None:
    cursor = samples(epochs=2)
    expected = list(samples(epochs=2))
    seen: list[list[int]] = []
    for batch in cursor.loader(Numbers(), num_workers=workers):
        assert cursor.step == len(seen)
        seen.append(batch.tolist())
        if len(seen) % 2:
            cursor.advance()
            cursor.advance()  # counts nothing: there is no other batch in use
            assert cursor.step == len(seen)
    assert seen == expected
    assert cursor.remaining == 0


def test_a_loader_drops_what_it_has_fetched_when_a_cursor_is_loaded() -> None:
    cursor, later = samples(), samples()
    later.load_state_dict(later.state_dict() | {"position": 40})
    batches = iter(cursor.loader(Numbers(), num_workers=2))
    next(batches)
    cursor.load_state_dict(later.state_dict())
    assert lists(batches) == list(samples())[5:]


def test_a_dataloader_of_the_user_says_that_a_cursor_was_loaded_below_it() -> None:
    cursor = samples()
    batches = iter(DataLoader(Numbers(), batch_sampler=cursor.batch_sampler()))
    next(batches)
    cursor.load_state_dict(cursor.state_dict())
    with pytest.raises(RuntimeError, match="begin a new iteration"):
        next(batches)


def test_micro_batches_are_delivered_one_by_one_and_the_last_one_ends_the_batch() -> None:
    cursor = samples(world=2, micro_batch=2)
    loader = cursor.loader(Numbers(), micro=True)
    expected = [part for s in [samples(world=2, micro_batch=2)] for share in s for part in s.split(share)]
    assert len(loader) == len(expected) == 25
    seen = []
    for number, batch in enumerate(loader):
        seen.append(batch.tolist())
        cursor.advance()  # before the last part it counts nothing
        assert cursor.step == min((number + 1) // 2 + (number == 24), 13)
    assert seen == expected


def test_an_empty_share_is_replaced_by_a_sample_without_weight() -> None:
    ranks = [Samples(9, 4, shuffle=False, rank=rank, world=4) for rank in range(4)]
    loaded = [[b.tolist() for b in DataLoader(Numbers(), batch_sampler=r.batch_sampler())] for r in ranks]
    assert [batches[-1] for batches in loaded] == [[8], [8], [8], [8]]
    for rank in ranks:
        rank.load_state_dict(rank.state_dict() | {"position": 8})
    assert [rank.weight for rank in ranks] == [0, 0, 0, 4]


def test_a_sampler_has_the_order_of_the_run_for_frameworks_that_share_it_out() -> None:
    cursor = samples(rank=1, world=2)
    expected = list(Samples(100, 8, rank=0, world=1))
    loader = DataLoader(Numbers(), sampler=cursor.sampler(), batch_size=8)
    assert len(cursor.sampler()) == 100
    batches = iter(loader)
    assert next(batches).tolist() == expected[0]
    cursor.advance()
    assert lists(iter(loader)) == expected[1:]


@pytest.mark.parametrize("option", ["batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"])
def test_what_samples_decide_is_no_option_of_the_loader(option: str) -> None:
    options: dict[str, Any] = {option: 1}
    with pytest.raises(ValueError, match=f"{option} is decided by Samples"):
        samples().loader(Numbers(), **options)


@pytest.mark.filterwarnings("default")  # those of Lightning
def test_a_lightning_trainer_takes_them_and_goes_on_in_the_middle_of_an_epoch() -> None:
    lightning = pytest.importorskip("lightning")

    class Model(lightning.LightningModule):  # type: ignore[misc, name-defined, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.seen: list[list[int]] = []

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            self.seen.append(batch.tolist())
            loss: torch.Tensor = self.layer(batch[:, None].float() / 100).mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    cursor = samples(epochs=3)

    class Advance(lightning.Callback):  # type: ignore[misc, name-defined, unused-ignore]
        def on_train_batch_end(self, *_: Any) -> None:
            cursor.advance()

    def fit(**limit: int) -> list[list[int]]:
        loader = DataLoader(Numbers(), batch_sampler=cursor.batch_sampler())
        quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = lightning.Trainer(
            accelerator="cpu",
            use_distributed_sampler=False,
            callbacks=[Advance()],
            enable_model_summary=False,
            **quiet,
            **limit,
        )
        model = Model()
        trainer.fit(model, loader)
        return model.seen

    first = fit(max_steps=17)
    assert (cursor.epoch, cursor.position) == (1, 32)
    assert first + fit(max_epochs=2) == list(samples(epochs=3))
