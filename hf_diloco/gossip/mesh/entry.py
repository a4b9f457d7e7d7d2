"""How a restarted node rejoins while the others go on: its own side. `rejoin` has its neighbours' side, and the keys.

If nodes are in lockstep, they agree on a future step while they go on. One node proposes a step. Nodes that take steps
never wait for an answer: a proposal that is not decided when its step begins is rejected.

    PREFIX/at/NODE              the step that a node is at
    PREFIX/proposal             the number of the round, and the proposed step
    PREFIX/ROUND/NODE           whether the step is still in the future for this node
    PREFIX/ROUND/decision       whether the step is agreed: the first record counts

`FreeEntry` is for nodes without lockstep.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from hf_diloco.errors import IslandLostError
from hf_diloco.gossip.mesh.edges import Edge
from hf_diloco.gossip.mesh.exchange import StragglerTimeout
from hf_diloco.gossip.mesh.joining import Joining
from hf_diloco.gossip.mesh.store import Board, entry_prefix, lost_key
from hf_diloco.gossip.records import Record, whole_number
from hf_diloco.transport.connections import PROBE_SECONDS
from hf_diloco.transport.transfers import Transfers

T = TypeVar("T")

FIRST_MARGIN = 2
"""Steps from the current to the proposed one. Doubles with each round, as many short steps pass during a request."""

MAX_ROUNDS = 12


def decide(board: Board, prefix: str, number: int, node: int, is_on: bool) -> bool:
    """Writes the decision of a round, unless there is one already; returns the decision that counts."""
    return board.put_first(f"{prefix}/{number}/decision", {"is_on": is_on}, node).get("is_on") is True


@dataclass
class Agreement(ABC):
    """One side of an agreement on a future step, between two nodes that both take steps.

    Attributes:
        prefix: of the keys; unique.
        node, peer: this node, and the other one.
    """

    board: Board
    prefix: str
    node: int
    peer: int
    _round: int = field(default=0, init=False)
    _step: int | None = field(default=None, init=False)

    @abstractmethod
    def is_now(self, step: int) -> bool:
        """Whether `step`, which begins now, is the agreed one. Call it at the beginning of each step.

        Raises:
            IslandLostError: the two are too far apart, or did not agree within `MAX_ROUNDS`.
        """

    def _hear(self, what: str) -> Record | None:
        return self.board.read(f"{self.prefix}/{what}", self.peer)

    def _say(self, what: str, record: Record) -> None:
        self.board.put(f"{self.prefix}/{what}", record)

    def _decide(self, is_on: bool) -> bool:
        return decide(self.board, self.prefix, self._round, self.peer, is_on)


class Responder(Agreement):
    """The side that answers proposals."""

    def is_now(self, step: int) -> bool:
        self._say(f"at/{self.node}", {"step": step})
        self._answer(step)
        while self._step is not None and self._step <= step:
            # No waiting for the other side's decision: it may be waiting for this node.
            if self._decide(is_on=False):
                return True
            self._step = None
            self._answer(step)
        return False

    def _answer(self, step: int) -> None:
        proposal = self._hear("proposal")
        if proposal is None or (number := whole_number(proposal, "round", self.peer)) <= self._round:
            return
        self._round, proposed = number, whole_number(proposal, "step", self.peer)
        is_to_come = proposed > step
        self._step = proposed if is_to_come else None
        self._say(f"{self._round}/{self.node}", {"is_to_come": is_to_come})


@dataclass
class Proposer(Agreement):
    """The side that makes proposals.

    Attributes:
        max_gap: steps that the two nodes may be apart. The one ahead would have to wait for the other.
    """

    max_gap: int
    _is_on: bool = field(default=False, init=False)

    def is_now(self, step: int) -> bool:
        if self._step is None:
            self._propose(step)
        elif not self._is_on:
            self._hear_answer(step)
        return self._is_on and step == self._step

    def _propose(self, step: int) -> None:
        theirs = self._hear(f"at/{self.peer}")
        if theirs is None:
            return
        their_step = whole_number(theirs, "step", self.peer)
        if abs(their_step - step) > self.max_gap or self._round == MAX_ROUNDS:
            raise IslandLostError(f"node {self.peer} is at step {their_step}, this one at {step}", [self.peer])
        self._step = max(their_step, step) + (FIRST_MARGIN << self._round)
        self._round += 1
        self._say("proposal", {"round": self._round, "step": self._step})

    def _hear_answer(self, step: int) -> None:
        assert self._step is not None
        answer = self._hear(f"{self._round}/{self.peer}")
        if answer is None and step < self._step:
            return
        is_to_come = answer is not None and answer.get("is_to_come") is True and step <= self._step
        self._is_on = self._decide(is_on=is_to_come)
        if not self._is_on:
            self._step = None


class Entry:
    """Agrees with the neighbours on a step, and takes their mean.

    Args:
        straggler_timeout: the timeout for late neighbours; also reports the wait to those that wait for this node.
        timeout: seconds that a step of the neighbours may take.
        lose: removes a neighbour that was just lost from `edges`.
    """

    def __init__(
        self,
        joining: Joining,
        edges: dict[int, Edge],
        straggler_timeout: StragglerTimeout,
        timeout: float,
        lose: Callable[[int], None],
    ) -> None:
        self._board = joining.board
        self._node = joining.node
        self._prefix = entry_prefix(joining.node, joining.start)
        self._edges = edges
        self._straggler_timeout = straggler_timeout
        self._timeout = timeout
        self._lose = lose

    def take(self, x: torch.Tensor) -> int:
        """Overwrites `x`, in host memory, with the neighbours' mean at the agreed step; returns that step."""
        step = self._agree()
        self._await_step(step)
        total: torch.Tensor | None = None
        num_given = 0
        buffer = torch.empty_like(x)
        for peer in sorted(self._edges):
            if self._transfer(peer, lambda edge, transfers: edge.receive(buffer, transfers)):
                total = x.copy_(buffer) if total is None else total.add_(buffer)
                num_given += 1
        self._check_peers_left()
        x.mul_(1.0 / num_given)
        self._board.remove(lost_key(self._node))
        self._board.count("returned", 1)  # before any neighbour goes on: the next average includes this node
        for peer in sorted(self._edges):
            self._transfer(peer, lambda edge, transfers: edge.send(torch.ones(1, dtype=torch.uint8), transfers))
        self._check_peers_left()
        return step

    def _agree(self) -> int:
        """Returns the step at which all neighbours will send their parameters."""
        for number in range(1, MAX_ROUNDS + 1):
            step = max(self._ask("at", "step").values()) + (FIRST_MARGIN << (number - 1))
            self._board.put(self._key("proposal"), {"round": number, "step": step})
            answers = self._ask(str(number), "is_to_come")
            if decide(self._board, self._prefix, number, self._node, is_on=all(answers.values())):
                return step
        raise IslandLostError(
            f"node {self._node} could not agree with its neighbours on a step at which to return: start it again"
        )

    def _ask(self, topic: str, field: str) -> dict[int, int]:
        """Returns the answers of all neighbours; those that do not answer within two exchange timeouts are lost."""
        self._straggler_timeout.begin_other("returning", 2 * self._timeout)
        return self._await(lambda peer: self._hear(peer, topic, field))

    def _await_step(self, step: int) -> None:
        """Waits until all neighbours are at the agreed step.

        Until the first one is, each step may take two exchange timeouts. From then on the others may be as late as in
        any exchange, as the first one waits for them.
        """
        at: dict[int, int] = {}
        self._straggler_timeout.begin_other("returning", self._timeout)
        self._straggler_timeout.renew(2)

        def look(peer: int) -> int | None:
            now = self._hear(peer, "at", "step") or 0
            if now != at.get(peer):
                at[peer] = now
                self._straggler_timeout.renew(1 if max(at.values()) >= step else 2)
            return now if now >= step else None

        self._await(look)

    def _await(self, say: Callable[[int], T | None]) -> dict[int, T]:
        """Polls `say` until all neighbours have answered; those that do not, or that disconnect, are lost."""
        said: dict[int, T] = {}
        clock, await_news = self._board.clock, self._board.news()
        looked = clock.now()
        while missing := sorted(self._edges.keys() - said.keys()):
            for peer in missing:
                if (word := say(peer)) is not None:
                    said[peer] = word
                self._straggler_timeout.exclude_own_pause()
            if clock.now() - looked > PROBE_SECONDS:
                looked = clock.now()
                self._look_at([peer for peer in missing if peer not in said])
            await_news()
        self._check_peers_left()
        return {peer: said[peer] for peer in self._edges}

    def _look_at(self, missing: list[int]) -> None:
        """Drops neighbours whose connection has broken, and the first missing one after the timeout."""
        for peer in list(self._edges):
            try:
                self._edges[peer].check()
                if peer in missing[:1]:
                    self._straggler_timeout.watch(peer)()
            except IslandLostError:
                self._lose(peer)

    def _transfer(self, peer: int, begin: Callable[[Edge, Transfers], None]) -> bool:
        """Sends to or receives from a neighbour. If that fails, drops the neighbour and returns False."""
        edge = self._edges[peer]
        self._straggler_timeout.begin_other("returning", self._timeout)
        try:
            transfers = edge.begin()
            begin(edge, transfers)
            self._straggler_timeout.wait_for(edge, transfers)
        except IslandLostError:
            self._lose(peer)
            return False
        return True

    def _hear(self, peer: int, topic: str, field: str) -> int | None:
        """Returns a field of a neighbour's record on a topic; None if there is no record."""
        record = self._board.read(self._key(f"{topic}/{peer}"), peer)
        return None if record is None else whole_number(record, field, peer)

    def _check_peers_left(self) -> None:
        if not self._edges:
            raise IslandLostError(
                f"node {self._node} could not return, as none of its neighbours is there: start it again when they "
                "are, or start all nodes again from their checkpoints if none goes on"
            )

    def _key(self, what: str) -> str:
        return f"{self._prefix}/{what}"


class FreeEntry(Entry):
    """For nodes without lockstep: receives the parameters of one neighbour after the other.

    Each neighbour sends at the beginning of its own next step, which may take up to `timeout`. Only this node waits:
    it asks a neighbour once it is ready to receive, and the neighbour sends only when asked.
    """

    def take(self, x: torch.Tensor) -> int:
        """Overwrites `x`, in host memory, with the neighbours' mean; returns the largest of their steps.

        With a smaller step this node would come to averages over all nodes that the others have already completed.
        """
        total, received, step = torch.zeros_like(x), torch.empty_like(x), torch.empty(1, dtype=torch.int64)
        steps: list[int] = []
        for peer in sorted(self._edges):

            def ask(edge: Edge, transfers: Transfers) -> None:
                edge.receive(step, transfers)
                edge.receive(received, transfers)
                self._board.put(self._key(f"asks/{edge.peer}"), {})

            if self._transfer(peer, ask):
                steps.append(int(step))
                total.add_(received)
        self._check_peers_left()
        torch.mul(total, 1.0 / len(steps), out=x)
        self._board.remove(lost_key(self._node))
        return max(steps)
