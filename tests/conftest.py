"""What all tests share: no network, clean environment variables, an order that leaves no core idle."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import re
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from hf_diloco.cli.devices import num_cores
from tests import forks
from tests.processes import ROOT, STARTED, find_free_port

PROCESS_LINES_SHOWN = 60  # of each process of a test that failed
MAX_WORKERS = 8  # a test may start four processes of a gigabyte each
GROUPS = {  # tests that share a costly fixture run in the same worker
    re.compile(
        r".*::test_(shards_are_the_masters|gather_and_scatter|the_inner_optimizer_is_seen)\[(\d)"
    ): r"matrix on \2 ranks",
    re.compile(r"tests/distributed/test_shards\.py"): "refusals",
    re.compile(r"tests/docs/test_commands\.py"): "commands",
    re.compile(r"tests/docs/test_site\.py"): "site",
    re.compile(r"tests/equivalence/(test_equivalence|test_fsdp2|test_other_ranks)\.py"): r"\1",
    re.compile(r"tests/simulated/test_gossip_run\.py"): "gossip run",
}
FREEZE_EVERY = 50  # tests; the Trainer looks for garbage whenever it ends, also among all that they have imported
DISTRIBUTED_TIMEOUT = 300  # seconds; a test's own `timeout` mark comes first

# Before any library is imported, and inherited by every process that a test starts.
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    WANDB_MODE="disabled",
    TOKENIZERS_PARALLELISM="false",
    MPLBACKEND="agg",
)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several processes share few cores

# Set by launchers and, within a process, by accelerate: ACCELERATE_USE_DEEPSPEED makes a later plain Trainer use ZeRO.
LAUNCHER_VARIABLES = re.compile(
    r"(ACCELERATE|DEEPSPEED|DS|FSDP|TORCHELASTIC|OMPI_COMM_WORLD|PMI)_.*"
    r"|HF_DILOCO_(?!TEST_).*"
    r"|(LOCAL_|GROUP_|ROLE_|CROSS_)?(RANK|SIZE|WORLD_SIZE)|MASTER_(ADDR|PORT)|ROLE_NAME"
)

_run = itertools.count(1)

pytest_plugins = ["tests.selection"]

settings.register_profile("hf_diloco", deadline=None, print_blob=True)  # a shared machine has slow moments
settings.load_profile("hf_diloco")


def pytest_configure(config: pytest.Config) -> None:
    """Caches of datasets and the hub go into a folder of this session; Ctrl-C works in processes started by tests."""
    forks.skip_fsync()
    gc.disable()  # until all is imported: a sixth of the time to the first test went into looking for garbage
    if not hasattr(config, "workerinput"):  # workers use that of the process that started them
        cache = tempfile.TemporaryDirectory(prefix="hf-diloco-tests-", ignore_cleanup_errors=True)
        config.add_cleanup(cache.cleanup)
        os.environ["HF_HOME"] = cache.name
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # pytest runs in a shell's background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup; a handler, unlike SIG_IGN, is not inherited
        signal.signal(signal.SIGHUP, lambda *_: None)


def pytest_xdist_setupnodes() -> None:
    """Workers are forked with all heavy modules imported, and have no need to import them for those they start."""
    forks.install()


def pytest_collection_finish() -> None:
    """What was imported stays: leaves it out of every later collection."""
    gc.freeze()
    gc.enable()


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """`-n auto`: a worker for each core, and more where tests wait at times; slow ones start more processes each.

    None for a few chosen tests, which start sooner in this process.
    """
    is_file = config.args_source.name == "ARGS" and any(".py" in arg for arg in config.args)
    chosen = config.option.keyword or config.option.lf or config.option.usepdb or is_file
    if config.args == ["tests/unit"]:
        more = 0
    else:
        more = {"not slow": 4, "slow": 2}.get(config.option.markexpr, 3)
    return 0 if chosen else min(num_cores() + more, MAX_WORKERS)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling | None:
    """Two workers share the tests one by one, but for those that share a costly fixture."""
    return GroupScheduling(config, log) if config.option.dist == "load" else None


class GroupScheduling(LoadScopeScheduling):
    """Sends the tests of one of `GROUPS` to one worker; every other test is a unit of its own."""

    def _split_scope(self, nodeid: str) -> str:
        matches = ((pattern.match(nodeid), name) for pattern, name in GROUPS.items())
        return next((match.expand(name) for match, name in matches if match), nodeid)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Runs fast tests first, those of several processes after them, slow ones and those with a long timeout last.

    Where several workers share them, the other way round: then the short ones fill the end, and no worker is idle.
    """
    for item in items:
        if item.get_closest_marker("distributed") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(DISTRIBUTED_TIMEOUT))
    is_shared = hasattr(config, "workerinput")
    items.sort(
        key=lambda item: (
            bool(item.get_closest_marker("slow")),
            bool(item.get_closest_marker("distributed")),
            max((mark.args[0] for mark in item.iter_markers("timeout")), default=0),
        ),
        reverse=is_shared,
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure shows the end of the output of every process that the test started."""
    report = yield
    if report.failed:
        for number, process in enumerate(STARTED):
            title = f"process {number}, {process.state}: {process.command[:200]}"
            report.sections.append((title, process.tail(PROCESS_LINES_SHOWN)))
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Tests marked `distributed` fork their Python processes, unless `real_start` has them begin as a user does."""
    with forks.real_processes() if item.get_closest_marker("real_start") else contextlib.nullcontext():
        if item.get_closest_marker("distributed"):
            forks.install()  # also for those that benchmarks start
        try:
            return (yield)
        finally:
            STARTED.clear()
            if not next(_run) % FREEZE_EVERY:
                gc.collect()
                gc.freeze()


@pytest.fixture(autouse=True)
def clean_environment() -> Iterator[None]:
    """Launchers' variables and accelerate's process-wide state leak neither into a test nor out of it."""
    _forget_launchers()
    yield
    _forget_launchers()
    if "accelerate.state" in sys.modules:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
    if "transformers.integrations.deepspeed" in sys.modules:
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()


def _forget_launchers() -> None:
    for name in filter(LAUNCHER_VARIABLES.fullmatch, list(os.environ)):
        del os.environ[name]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch computes on one thread, as in each of several processes on one machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def compiled_averages() -> None:
    """For nodes with short timeouts: in a fresh checkout Numba takes seconds for what they average with."""
    import torch

    from hf_diloco.gossip.averages import mix_

    vector = torch.zeros(8)
    for num_neighbours in (1, 2, 3):
        mix_(torch.empty(8), vector, [(0.25, vector)] * num_neighbours)


@pytest.fixture
def free_port() -> int:
    """A TCP port of this machine that nothing listens on."""
    return find_free_port()


@pytest.fixture
def own_address() -> str:
    """By which other machines reach this one."""
    from hf_diloco.store.rendezvous import local_address

    try:
        return local_address("198.51.100.1", 1)  # nobody has it, nor is anything sent there
    except OSError:
        pytest.skip("this machine has no network")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real text and images that are not part of the project; skips where they are missing.

    `HF_DILOCO_TEST_DATA`, or else shared/data beside the project.
    """
    folder = Path(os.environ.get("HF_DILOCO_TEST_DATA") or ROOT.parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"needs the test data: no folder {folder}, and HF_DILOCO_TEST_DATA names no other")
    return folder
