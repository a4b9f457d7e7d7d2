"""Checkpoints of real trainings that are damaged, cut short or out of order: the newest whole one is always used."""

from __future__ import annotations

import itertools
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_diloco import DiLoCoCallback
from hf_diloco.apps.lm.plain import PlainCallback
from hf_diloco.apps.lm.runfile import DiLoCoBlock
from hf_diloco.errors import CheckpointError
from hf_diloco.gossip import checkpoint
from hf_diloco.gossip.checkpoint import (
    GossipIndex,
    check_index,
    lives_of,
    save_index,
    sound_checkpoints,
    whole_checkpoints,
)
from hf_diloco.inner.island import IslandGroup
from hf_diloco.membership.fingerprint import find_common
from hf_diloco.outer.checkpoint import (
    RECORD,
    OuterPart,
    complete_checkpoints,
    find_complete,
    last_of_earlier_round,
    save_outer,
)
from hf_diloco.trainer.checkpoint_folder import CheckpointFolder
from tests.islands import try_islands
from tests.outer_state import make_index
from tests.processes import find_free_port
from tests.thread_group import ThreadGroup
from tests.trainers import make_saving_trainer, second_island, weights_of


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A run with whole checkpoints of steps 2, 4 and 6, and its last weights."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    trainer = make_saving_trainer(folder, DiLoCoCallback(sync_every=3))
    trainer.train()
    return folder, weights_of(trainer)


@pytest.fixture
def run(trained: tuple[Path, torch.Tensor], tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained[0], tmp_path / "run"))


def half(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], None]] = {"half": half, "a bit": flip, "gone": Path.unlink}
FILES = (
    "model.safetensors",
    "config.json",
    "optimizer.pt",
    "scheduler.pt",
    "rng_state.pth",
    "trainer_state.json",
    "diloco/rank-00000.safetensors",
    "diloco/outer.json",
)


def test_these_are_all_files(run: Path) -> None:
    """What the Trainer writes besides is not needed to resume, and is watched as well."""
    found = {path.relative_to(run / "checkpoint-6").as_posix() for path in (run / "checkpoint-6").rglob("*.*")}
    assert set(FILES) <= found
    ((_, index),) = [item for item in complete_checkpoints(run) if item[1].global_step == 6]
    assert {file.name for file in index.checkpoint} == found - {"diloco/outer.json"}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_makes_the_older_checkpoint_count(
    run: Path, name: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    DAMAGES[damage](run / "checkpoint-6" / name)
    with caplog.at_level(logging.WARNING, "hf_diloco"):
        assert DiLoCoCallback(sync_every=3).common_checkpoint(run) == run / "checkpoint-4"
    assert "checkpoint-6 is skipped" in caplog.text
    assert name.rpartition("/")[2] in caplog.text


@pytest.mark.parametrize("is_named", [False, True])
def test_from_there_the_run_ends_as_it_would_have(
    run: Path, trained: tuple[Path, torch.Tensor], is_named: bool
) -> None:
    flip(run / "checkpoint-6" / "optimizer.pt")
    callback = DiLoCoCallback(sync_every=3)
    checkpoint = run / "checkpoint-4"
    if is_named:
        callback.check_checkpoint(checkpoint)
    else:
        assert callback.common_checkpoint(run) == checkpoint
    trainer = make_saving_trainer(run, callback)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert torch.equal(weights_of(trainer), trained[1])
    assert DiLoCoCallback(sync_every=3).common_checkpoint(run) == run / "checkpoint-6", "it has been written again"


def test_where_all_are_damaged_there_is_none(run: Path) -> None:
    for step in (2, 4, 6):
        flip(run / f"checkpoint-{step}" / "scheduler.pt")
    assert DiLoCoCallback(sync_every=3).common_checkpoint(run) is None


@pytest.mark.parametrize("name", ["optimizer.pt", "model.safetensors"])
def test_one_that_is_named_and_damaged_is_an_error_that_names_the_file(run: Path, name: str) -> None:
    flip(run / "checkpoint-4" / name)
    with pytest.raises(CheckpointError, match=rf"checkpoint-4/{re.escape(name)} does not hold what was written to it"):
        DiLoCoCallback(sync_every=3).check_checkpoint(run / "checkpoint-4")
    (run / "checkpoint-4" / name).unlink()
    with pytest.raises(CheckpointError, match=rf"checkpoint-4/{re.escape(name)} is missing: resume from an earlier"):
        DiLoCoCallback(sync_every=3).check_checkpoint(run / "checkpoint-4")


def test_a_damage_that_the_trainer_does_not_see_ends_the_resume(run: Path) -> None:
    """The Trainer would go on from other weights."""
    flip(run / "checkpoint-4" / "model.safetensors")
    trainer = make_saving_trainer(run, DiLoCoCallback(sync_every=3))
    with pytest.raises(CheckpointError, match=r"model\.safetensors does not hold what was written"):
        trainer.train(resume_from_checkpoint=str(run / "checkpoint-4"))


@pytest.mark.parametrize(
    "change", [('"round": 2', '"round": 3'), (' "data"', ' "date"'), ("own_digest", "own_digesu")]
)
def test_a_changed_record_is_no_whole_checkpoint(run: Path, change: tuple[str, str]) -> None:
    path = run / "checkpoint-6" / "diloco" / "outer.json"
    path.write_text(path.read_text().replace(*change, 1))
    assert DiLoCoCallback(sync_every=3).common_checkpoint(run) == run / "checkpoint-4"
    with pytest.raises(CheckpointError, match=r"outer\.json (does not hold what was written to it|cannot be read)"):
        make_saving_trainer(run, DiLoCoCallback(sync_every=3)).train(resume_from_checkpoint=str(run / "checkpoint-6"))


# Which ones stay


def ahead_by(path: Path, seconds: float) -> None:
    when = time.time() + seconds
    os.utime(path, (when, when))


@pytest.mark.parametrize("kind", ["island", "plain"])
def test_the_clock_does_not_decide_which_checkpoints_stay(kind: str, run: Path) -> None:
    """As after a clock that was set back: the old checkpoint looks newer than all that come."""
    make: Callable[[], Any] = lambda: (  # noqa: E731
        DiLoCoCallback(sync_every=3)
        if kind == "island"
        else PlainCallback(DiLoCoBlock(enabled=False), 16, run / "stop")
    )
    shutil.rmtree(run)
    make_saving_trainer(run, make(), max_steps=2).train()
    ahead_by(run / "checkpoint-2", 3600.0)
    trainer = make_saving_trainer(run, make(), save_total_limit=1)
    trainer.train(resume_from_checkpoint=str(run / "checkpoint-2"))
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-6"]
    assert make().common_checkpoint(run) == run / "checkpoint-6"
    assert trainer.args.save_total_limit == 1


def test_the_limit_counts_whole_checkpoints_alone_and_spares_copies(run: Path) -> None:
    shutil.copytree(run / "checkpoint-2", run / "checkpoint-2-kept")
    for step in (3, 5):  # left by runs that were killed
        shutil.copytree(run / "checkpoint-2", run / f"checkpoint-{step}")
        (run / f"checkpoint-{step}" / "diloco" / "outer.json").unlink()
    for step in (4, 6):
        shutil.rmtree(run / f"checkpoint-{step}")
    trainer = make_saving_trainer(run, DiLoCoCallback(sync_every=3), save_total_limit=2, max_steps=4)
    trainer.train(resume_from_checkpoint=str(run / "checkpoint-2"))
    names = {path.name for path in run.iterdir() if path.is_dir()}
    assert names == {"checkpoint-2-kept", "checkpoint-2", "checkpoint-4", "checkpoint-5"}


def test_a_training_that_begins_anew_deletes_none_of_an_earlier_one(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_saving_trainer(run, DiLoCoCallback(sync_every=3), save_total_limit=1, save_steps=3).train()
    assert {path.name for path in run.glob("checkpoint-*")} == {f"checkpoint-{step}" for step in (2, 4, 6)}
    assert f"this training starts from scratch, but {run / 'checkpoint-6'} of an earlier one is there" in caplog.text


def test_a_training_that_begins_anew_deletes_none_of_a_trainer_alone(tmp_path: Path) -> None:
    make_saving_trainer(tmp_path, save_total_limit=None).train()
    make_saving_trainer(tmp_path, DiLoCoCallback(sync_every=3), save_total_limit=1, save_steps=3).train()
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {f"checkpoint-{step}" for step in (2, 4, 6)}


def test_a_run_without_outer_loop_deletes_none_of_the_run_that_it_goes_on_from(run: Path) -> None:
    callback = PlainCallback(DiLoCoBlock(enabled=False), 1, run / "stop")
    trainer = make_saving_trainer(run, callback, save_total_limit=1, max_steps=10)
    trainer.train(resume_from_checkpoint=str(callback.common_checkpoint(run)))
    assert {path.name for path in run.glob("checkpoint-*")} == {f"checkpoint-{step}" for step in (2, 4, 6, 10)}


def test_what_cannot_be_read_goes_where_it_would_if_it_were_whole(run: Path) -> None:
    """Older than the two newest whole ones. Newer than one of them, it is one of the two once it is read again."""
    for step in (1, 3):
        shutil.copytree(run / "checkpoint-2", run / f"checkpoint-{step}")
        record = run / f"checkpoint-{step}" / "diloco" / "outer.json"
        record.unlink()
        record.symlink_to(record)  # who opens it meets an error of the system
    for step in (4, 6):
        shutil.rmtree(run / f"checkpoint-{step}")
    last = run / "checkpoint-2"
    for step, left in ((4, {2, 3, 4}), (6, {4, 6})):
        trainer = make_saving_trainer(run, DiLoCoCallback(sync_every=3), save_total_limit=2, max_steps=step)
        trainer.train(resume_from_checkpoint=str(last))
        last = run / f"checkpoint-{step}"
        assert {path.name for path in run.glob("checkpoint-*")} == {f"checkpoint-{number}" for number in left}


class Killed(BaseException):
    """Stands for SIGKILL."""


def test_a_whole_checkpoint_stays_until_the_new_one_of_its_step_is_whole(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that goes on from step 2 writes 4 again: killed meanwhile, it has the old one."""

    def die(*_: Any) -> None:
        raise Killed

    trainer = make_saving_trainer(run, DiLoCoCallback(sync_every=3))
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "_save_rng_state", die)
        with pytest.raises(Killed):
            trainer.train(resume_from_checkpoint=str(run / "checkpoint-2"))
    assert not (run / "checkpoint-4" / "trainer_state.json").exists()
    shutil.rmtree(run / "checkpoint-6")
    assert DiLoCoCallback(sync_every=3).common_checkpoint(run) == run / "checkpoint-4"
    assert not list(run.glob("replaced-*"))


# The plain Trainer of a run file, and nodes of a graph


def test_a_damaged_checkpoint_of_a_plain_run_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def callback() -> PlainCallback:
        return PlainCallback(DiLoCoBlock(enabled=False), 16, tmp_path / "stop")

    make_saving_trainer(tmp_path, callback()).train()
    assert callback().common_checkpoint(tmp_path) == tmp_path / "checkpoint-6"
    half(tmp_path / "checkpoint-6" / "optimizer.pt")
    flip(tmp_path / "checkpoint-4" / "optimizer.pt")
    assert callback().common_checkpoint(tmp_path) == tmp_path / "checkpoint-2"
    assert "checkpoint-4 is skipped" in caplog.text
    with pytest.raises(CheckpointError, match=r"checkpoint-4/optimizer\.pt does not hold what was written"):
        callback().check_checkpoint(tmp_path / "checkpoint-4")
    for step in (2, 4, 6):  # as a Trainer without this callback leaves them
        (tmp_path / f"checkpoint-{step}" / "files.json").unlink()
    half(tmp_path / "checkpoint-6" / "trainer_state.json")
    assert callback().common_checkpoint(tmp_path) == tmp_path / "checkpoint-4"


INDEX = GossipIndex(step=2, node=0, num_nodes=2, method="dsgd")


def write_checkpoint_of_node(path: Path, step: int) -> None:
    path.mkdir()
    for name in ("model.safetensors", "optimizer.pt", "trainer_state.json"):
        (path / name).write_bytes(os.urandom(1000))
    save_index(path, INDEX.model_copy(update={"step": step}), IslandGroup())


def test_a_damaged_checkpoint_of_a_node_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ranks = IslandGroup()
    for step in (2, 4, 6, 8):
        write_checkpoint_of_node(tmp_path / f"checkpoint-{step}", step)
    assert set(sound_checkpoints(tmp_path, ranks)) == {2, 4, 6, 8}
    half(tmp_path / "checkpoint-8" / "optimizer.pt")
    assert set(whole_checkpoints(tmp_path)) == {2, 4, 6}
    flip(tmp_path / "checkpoint-6" / "model.safetensors")
    assert set(sound_checkpoints(tmp_path, ranks)) == {2, 4}
    assert "model.safetensors does not hold what was written to it: checkpoint-6 is skipped" in caplog.text


def test_a_node_behind_in_its_data_completes_no_checkpoint_whose_trainers_state_is_unreadable(tmp_path: Path) -> None:
    write_checkpoint_of_node(path := tmp_path / "checkpoint-2", step=2)
    with pytest.raises(CheckpointError, match=r"trainer_state\.json, which was just written, cannot be read"):
        save_index(path, INDEX, IslandGroup(), behind=1)


@pytest.mark.parametrize("what", ["sound_checkpoints", "check_index", "lives_of"])
def test_a_record_that_one_rank_of_a_node_cannot_read_ends_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The others waited for it, up to their timeout. Only the leader reads which lives there are."""
    write_checkpoint_of_node(tmp_path / "checkpoint-2", step=2)
    read, blind = checkpoint.read_index, set[int]()
    meeting, items = threading.Barrier(2, timeout=20), dict[int, Any]()

    def read_unless_blind(path: Path) -> GossipIndex:
        if threading.get_ident() in blind:
            raise CheckpointError("stale file handle")
        return read(path)

    def look(rank: int) -> object:
        if rank == 1:
            blind.add(threading.get_ident())
        ranks, path = ThreadGroup(rank, meeting, items), tmp_path / "checkpoint-2"
        if what == "check_index":
            check_index(path, INDEX, ranks)
        return sound_checkpoints(tmp_path, ranks) if what == "sound_checkpoints" else lives_of({2: path}, ranks)

    monkeypatch.setattr(checkpoint, "read_index", read_unless_blind)
    expected = [(2, "")] if what == "lives_of" else "stale file handle"
    assert [found if what == "lives_of" else str(found) for found in try_islands(2, look)] == [expected] * 2


# Islands that agree on a round


def write_checkpoint(path: Path, number: int, step: int) -> None:
    path.mkdir(parents=True)
    (path / "trainer_state.json").write_text("{}")
    part = OuterPart({"anchor": torch.full((4,), float(number))}, [(0, 4)])
    save_outer(path, IslandGroup(), [part], make_index(4, round=number, global_step=step))


def find_on_both(folder: Path) -> list[Path | None]:
    """What two islands would resume from, whose checkpoints are in folders 0 and 1."""
    posted: dict[str, dict[int, Any]] = {}
    barrier = threading.Barrier(2)

    def common(island: int) -> Path | None:
        def share(topic: str, record: dict[str, Any]) -> list[dict[str, Any]]:
            posted.setdefault(topic, {})[island] = record
            barrier.wait(60)
            return [posted[topic][number] for number in range(2)]

        return find_common(folder / str(island), IslandGroup(), share)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(common, range(2)))


def test_islands_go_back_to_a_round_that_is_sound_on_all(tmp_path: Path) -> None:
    """Island 1 holds a damaged checkpoint of the newest common round: both take the one before."""
    for island, number in itertools.product(range(2), range(1, 5)):
        write_checkpoint(tmp_path / str(island) / f"checkpoint-{number}", number, step=number)
    flip(tmp_path / "1" / "checkpoint-4" / "trainer_state.json")
    flip(tmp_path / "0" / "checkpoint-3" / "diloco" / "rank-00000.safetensors")
    assert find_on_both(tmp_path) == [tmp_path / "0" / "checkpoint-2", tmp_path / "1" / "checkpoint-2"]


def test_islands_begin_anew_where_one_was_killed_before_its_first_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert find_on_both(tmp_path) == [None, None]
    assert not caplog.messages
    write_checkpoint(tmp_path / "0" / "checkpoint-2", number=0, step=2)
    assert find_on_both(tmp_path) == [None, None]
    assert "(island 0: [0], island 1: none): all start from scratch" in caplog.text


def test_the_round_that_all_went_back_to_stays_until_there_is_a_newer_one_beside(tmp_path: Path) -> None:
    """They went back to step 12, as only this island had those of steps 18 and 24."""
    for step, number in ((12, 3), (18, 4), (24, 6)):
        write_checkpoint(tmp_path / f"checkpoint-{step}", number, step)
    needed = partial(last_of_earlier_round, 12)
    checkpoints = CheckpointFolder(tmp_path, IslandGroup(), RECORD, find_complete, needed, lambda: None, True, False)
    for step, number, staying in ((20, 5, [12, 20]), (21, 5, [12, 21]), (24, 6, [21, 24])):
        write = partial(write_checkpoint, number=number, step=step)
        assert checkpoints.complete(checkpoints.path(step), write, limit=1)
        assert [index.global_step for _, index in complete_checkpoints(tmp_path)] == staying


def test_a_users_link_is_not_kept_in_place_of_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "checkpoint-4", 1, 4)
    (tmp_path / "checkpoint-latest").symlink_to("checkpoint-4")
    glob = Path.glob
    monkeypatch.setattr(Path, "glob", lambda *given: iter(sorted(glob(*given))))  # as some file systems list them
    needed = partial(last_of_earlier_round, 4)
    checkpoints = CheckpointFolder(tmp_path, IslandGroup(), RECORD, find_complete, needed, lambda: None, True, False)
    assert checkpoints.complete(checkpoints.path(8), partial(write_checkpoint, number=2, step=8), limit=1)
    assert (tmp_path / "checkpoint-4").is_dir()


def test_a_checkpoint_set_aside_is_found_though_its_unfinished_successor_cannot_be_deleted(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a network file system, while a hanging process has one of its files open."""
    (run / "checkpoint-6").rename(run / "replaced-checkpoint-6")
    (run / "checkpoint-6").mkdir()
    (run / "checkpoint-6" / ".nfs0001").touch()
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)
    assert DiLoCoCallback(sync_every=3).common_checkpoint(run) == run / "checkpoint-6"


def test_of_islands_that_go_back_together_each_keeps_two_rounds(tmp_path: Path) -> None:
    """If both lose power now, the other may not have written its checkpoint of round 2 yet."""
    with second_island(find_free_port(), tmp_path, rounds=2, sync_every=3) as settings:
        trainer = make_saving_trainer(tmp_path, DiLoCoCallback(**settings), save_steps=1, save_total_limit=1)
        trainer.train()
    assert [(index.global_step, index.round) for _, index in complete_checkpoints(tmp_path)] == [(5, 1), (6, 2)]
