"""The fingerprint that islands compare before they train together, and their common checkpoint to resume from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Set
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.errors import CheckpointError, RendezvousError
from hf_diloco.inner.base import Shards
from hf_diloco.inner.island import IslandGroup
from hf_diloco.membership.all_gather import CheckpointsRecord, SoundRecord, parse_records
from hf_diloco.membership.facts import TRAINABLE, Facts, frozen_facts, join_facts
from hf_diloco.membership.heartbeats import Members
from hf_diloco.methods.outer import find_method, make_method
from hf_diloco.outer.checkpoint import newest_sound, whole_checkpoints
from hf_diloco.utils.own_files import identify

logger = logging.getLogger("hf_diloco")

_AGREED_SETTINGS = (
    "sync_every",
    "outer_lr",
    "outer_momentum",
    "nesterov",
    "weight_by",
    "num_fragments",
    "fragment_order",
    "fragment_sync_delay",
    "fragment_update_alpha",
    "connections",
)


def make_fingerprint(config: DiLoCoConfig, shards: Shards, more: Facts, given: Facts) -> dict[str, Any]:
    """Returns all facts that must be equal on all islands, under the names that error messages use.

    Args:
        more: further facts of this package.
        given: the caller's facts, see `join_facts`.
    """
    membership: dict[str, Any] = {"num_islands": config.num_islands}
    if config.meets_in_store:
        membership = {"max_islands": config.num_shares, "exchange": "mesh" if config.is_direct else "bucket"}
    own = {
        "algorithm": identify(config.method),
        **_agreed_by_method(config, shards),
        **{name: getattr(config, name) for name in _AGREED_SETTINGS},
        "payload": identify(config.payload),
        "error_feedback": config.feedback_decay,
        "fragment_patterns": " ".join(config.fragment_patterns),
        **membership,
        TRAINABLE: shards.num_parameters,
        "model (names and sizes)": shards.digest,
        **frozen_facts(shards.frozen),
        **more,
    }
    return join_facts(own, given)


def _agreed_by_method(config: DiLoCoConfig, shards: Shards) -> dict[str, Any]:
    """Returns the method's own settings and, if it uses their learning rates, the parameter groups."""
    method = find_method(config.method)
    options = method.Options.model_validate(config.options).model_dump()
    agreed = {f"options.{name}": value for name, value in options.items()}
    if not method.wants_rates:
        return agreed
    listing = "\n".join(f"{name} {shards.inner.groups.get(name, 0)}" for name in shards.sizes)
    if make_method(config).buffers(shards.inner.kind) == "average":
        agreed["inner buffers"] = " ".join(shards.inner.buffers)
    return {**agreed, "parameter groups": xxhash.xxh3_128_hexdigest(listing.encode())}


def check_folders(places: Mapping[int, tuple[str, str]], unit: str = "island") -> None:
    """Raises `RendezvousError` if two islands, or nodes, write to the same folder of the same machine.

    Args:
        places: the host and the folder of each, by number.
        unit: "island" or "node".
    """
    seen: dict[tuple[str, str], int] = {}
    for number, place in places.items():
        other = seen.setdefault(place, number)
        if other != number:
            raise _same_folder(other, number, *place, unit)


def check_own_folder(members: Members | None) -> None:
    """Raises `RendezvousError` if another live island on this machine writes to this island's folder."""
    assert members is not None  # called on the leader
    own = members.process_of(members.island, members.incarnation)
    for island in sorted(members.others()):
        other = members.process_of(island, members.incarnation_of(island))
        if own and own.machine and other and (other.machine, other.folder) == (own.machine, own.folder):
            one, two = sorted((island, members.island))
            raise _same_folder(one, two, own.host, own.folder, "island")


def _same_folder(one: int, other: int, host: str, folder: str, unit: str) -> RendezvousError:
    number = {"island": "DiLoCoConfig().island", "node": "GossipConfig().node"}[unit]
    return RendezvousError(
        f"{unit}s {one} and {other} both write to {folder} on {host} and would overwrite each other's checkpoints: "
        f"give each its own output_dir, with {number} in its name"
    )


def find_common(
    output_dir: Path, island: IslandGroup, share: Callable[[str, dict[str, Any]], list[dict[str, Any]]]
) -> Path | None:
    """Returns this island's newest checkpoint of the newest round that all islands hold; None to begin anew.

    Rounds match only if their outer parameters are equal: a checkpoint may be left over from before all islands went
    back to an earlier round, and then trained differently. All files are checked: if one is corrupt, this logs a
    warning and takes an older round. Collective over the island's ranks.

    Args:
        output_dir: where this island's checkpoints are.
        share: posts this island's record under a topic and returns all islands' records; called on the leader.

    Raises:
        CheckpointError: the islands hold checkpoints, but of no common round.
    """
    mine = whole_checkpoints(output_dir, island)
    attempt = 0
    while True:
        held = {state for _, state in mine}
        common = island.on_leader(partial(_common_state, share, f"checkpoints{attempt or ''}", held))
        if common is None:
            return None
        newest = [path for path, state in mine if state == tuple(common)][-1:]
        sound = newest_sound(newest, island)
        votes = island.on_leader(partial(share, f"sound{attempt or ''}", {"sound": sound is not None}))
        if all(record.sound for record in parse_records(SoundRecord, votes)):
            return sound
        mine = [(path, state) for path, state in mine if sound is not None or path not in newest]
        attempt += 1


def _common_state(
    share: Callable[[str, dict[str, Any]], list[dict[str, Any]]], topic: str, mine: Set[tuple[int, str]]
) -> tuple[int, str] | None:
    """Returns the newest round that all islands hold, with the digest of the outer parameters; None to begin anew,
    if no island has completed a round."""
    digests: dict[int, list[str]] = {}
    for number, digest in sorted(mine):
        digests.setdefault(number, []).append(digest)
    held = [record.rounds for record in parse_records(CheckpointsRecord, share(topic, {"rounds": digests}))]
    states = [{(number, digest) for number, some in rounds.items() for digest in some} for rounds in held]
    if common := set.intersection(*states):
        return max(common)
    listing = ", ".join(f"island {island}: {sorted(rounds) or 'none'}" for island, rounds in enumerate(held))
    if any(number for rounds in held for number in rounds):
        if set.intersection(*(set(rounds) for rounds in held)):
            listing += "; of the same round, they hold different outer parameters"
        raise CheckpointError(
            f"the islands hold no checkpoint of a common round ({listing}): bring the missing checkpoints back. An "
            "island that has lost its own, or is new, can take a copy of another island's newest; then start all "
            "again. Or start anew in another run folder"
        )
    if any(held):
        logger.warning(
            "no round is complete, and not all islands hold a checkpoint (%s): all start from scratch", listing
        )
    return None
