"""A step that is yet to come, on which nodes agree while they go on.

One proposes. Nobody who takes steps waits for an answer: what is not decided by the step itself is off.

    PREFIX/at/NODE              the step that a node is at
    PREFIX/proposal             the round of asking, and the step
    PREFIX/ROUND/NODE           whether that step is yet to come, for a node
    PREFIX/ROUND/decision       whether it is for all: the first word counts
"""

from __future__ import annotations

from hf_diloco.errors import IslandLostError
from hf_diloco.gossip.mesh.store import Board
from hf_diloco.gossip.records import whole_number

FIRST_MARGIN = 2
"""Steps until the one that is proposed. Doubles with each round: where steps take no longer than asking, many pass."""

MAX_ROUNDS = 12


def decide(board: Board, prefix: str, number: int, node: int, is_on: bool) -> bool:
    """Writes the decision of a round unless there is one; returns the one that is there."""
    key = f"{prefix}/{number}/decision"
    board.put_first(key, {"is_on": is_on})
    return (board.read(key, node) or {}).get("is_on") is True


class Answers:
    """The side that is asked.

    Args:
        board: the mesh's.
        prefix: of the keys; unique.
        node: this node.
        peer: who asks.
    """

    def __init__(self, board: Board, prefix: str, node: int, peer: int) -> None:
        self._board = board
        self._prefix = prefix
        self._node = node
        self._peer = peer
        self._round = 0
        self._step: int | None = None

    def is_now(self, step: int) -> bool:
        """Whether it is the step that begins. To be asked at the beginning of each."""
        self._board.put(f"{self._prefix}/at/{self._node}", {"step": step})
        self._answer(step)
        while self._step is not None and self._step <= step:
            # To wait for the word of others here could be to wait for one who waits for this node.
            if decide(self._board, self._prefix, self._round, self._peer, is_on=False):
                return True
            self._step = None
            self._answer(step)
        return False

    def _answer(self, step: int) -> None:
        proposal = self._board.read(f"{self._prefix}/proposal", self._peer)
        if proposal is None or (number := whole_number(proposal, "round", self._peer)) <= self._round:
            return
        self._round, proposed = number, whole_number(proposal, "step", self._peer)
        is_to_come = proposed > step
        self._step = proposed if is_to_come else None
        self._board.put(f"{self._prefix}/{self._round}/{self._node}", {"is_to_come": is_to_come})


class Proposals:
    """The side that asks, and takes steps itself.

    Args:
        board: the mesh's.
        prefix: of the keys; unique.
        node: this node.
        peer: who is asked.
        max_gap: steps that the two may be apart. Whoever is ahead would have to wait for the other one.
    """

    def __init__(self, board: Board, prefix: str, node: int, peer: int, max_gap: int) -> None:
        self._board = board
        self._prefix = prefix
        self._node = node
        self._peer = peer
        self._max_gap = max_gap
        self._round = 0
        self._step: int | None = None
        self._is_on = False

    def is_now(self, step: int) -> bool:
        """Whether it is the step that begins. To be asked at the beginning of each.

        Raises:
            IslandLostError: the two are too far apart, or did not agree in many rounds.
        """
        if self._step is None:
            self._propose(step)
        elif not self._is_on:
            self._hear_answer(step)
        return self._is_on and step == self._step

    def _propose(self, step: int) -> None:
        theirs = self._board.read(f"{self._prefix}/at/{self._peer}", self._peer)
        if theirs is None:
            return
        their_step = whole_number(theirs, "step", self._peer)
        if abs(their_step - step) > self._max_gap or self._round == MAX_ROUNDS:
            raise IslandLostError(f"node {self._peer} is at step {their_step}, this one at {step}", [self._peer])
        self._step = max(their_step, step) + (FIRST_MARGIN << self._round)
        self._round += 1
        self._board.put(f"{self._prefix}/proposal", {"round": self._round, "step": self._step})

    def _hear_answer(self, step: int) -> None:
        assert self._step is not None
        answer = self._board.read(f"{self._prefix}/{self._round}/{self._peer}", self._peer)
        if answer is None and step < self._step:
            return
        is_to_come = answer is not None and answer.get("is_to_come") is True and step <= self._step
        self._is_on = decide(self._board, self._prefix, self._round, self._peer, is_on=is_to_come)
        if not self._is_on:
            self._step = None
