"""1-bit LAMB and Adam in one process: their equations, error feedback, masks, and what a checkpoint holds."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_diloco import OneBitAdam, OneBitLamb
from hf_diloco.apps.lm.runfile import load_run_file
from hf_diloco.errors import ConfigError, ExchangeError, UnsupportedError
from hf_diloco.optimizers.onebit import all_reduce
from hf_diloco.optimizers.onebit.all_reduce import OneBitAllReduce
from hf_diloco.optimizers.onebit.lamb import clip_factor
from hf_diloco.optimizers.onebit.optimizer import MAX_STEPS_LEFT_OUT
from hf_diloco.optimizers.onebit.trainer import OneBitCallback
from tests.processes import ROOT
from tests.small_model import Linear

SIZES = (1, 7, 8, 4097, 70_001)


def draw(seed: int, size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


# The all-reduce


class Reference:
    """One stage as the paper writes it."""

    def __init__(self, size: int) -> None:
        self.error = np.zeros(size, np.float32)

    def __call__(self, values: Any) -> Any:
        b = values + self.error
        scale = np.float32(np.sqrt(np.mean(b.astype(np.float64) ** 2)))
        sent = np.where(b < 0, -scale, scale)
        self.error = b - sent
        return sent


@pytest.fixture(params=["compiled", "as on an accelerator"])
def on_both(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "compiled":
        monkeypatch.setattr(all_reduce, "is_compiled_for", lambda values: False)


@pytest.mark.usefixtures("on_both")
@pytest.mark.parametrize("size", SIZES)
def test_one_rank_is_numpy(size: int) -> None:
    reduce, worker, server = OneBitAllReduce(size), Reference(size), Reference(size)
    for call in range(5):
        values = draw(call, size)
        expected = server(worker(values.numpy()))
        assert reduce.mean_(values) == 1
        np.testing.assert_allclose(values.numpy(), expected, rtol=1e-6)
        np.testing.assert_allclose(reduce.errors["worker"].numpy(), worker.error, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(reduce.errors["server"].numpy(), server.error, rtol=1e-5, atol=1e-6)


def test_what_is_left_out_is_sent_later() -> None:
    reduce = OneBitAllReduce(1000)
    true, sent = torch.zeros(1000, dtype=torch.float64), torch.zeros(1000, dtype=torch.float64)
    for call in range(200):
        values = draw(call, 1000)
        true += values
        reduce.mean_(values)
        sent += values
    left = reduce.errors["worker"].double() + reduce.errors["server"]
    assert (sent + left - true).abs().max() < 1e-4
    assert left.norm() < 0.5 * true.norm()  # else it says nothing


def test_zero_counts_as_positive() -> None:
    reduce = OneBitAllReduce(2)
    values = torch.tensor([-0.0, -2.0])
    reduce.mean_(values)
    assert values.tolist() == pytest.approx([2**0.5, -(2**0.5)])


@pytest.mark.usefixtures("on_both")
def test_values_that_are_not_finite_are_left_out() -> None:
    reduce = OneBitAllReduce(100)
    reduce.mean_(draw(0, 100))
    before = reduce.errors
    values = draw(1, 100)
    values[3] = float("nan")
    values[5] = float("inf")
    assert reduce.mean_(values) == 0
    expected = before["worker"].clone()
    expected[[3, 5]] = 0
    torch.testing.assert_close(reduce.errors["worker"], expected, atol=1e-6, rtol=0)
    assert torch.equal(reduce.errors["server"], before["server"])


# The warm-up


def make_tensors() -> list[torch.nn.Parameter]:
    shapes = ((5, 3), (7,), (4, 2, 2))
    return [torch.nn.Parameter(draw(10 + number, int(np.prod(s))).view(s)) for number, s in enumerate(shapes)]


def give_gradients(tensors: list[torch.nn.Parameter], step: int) -> None:
    for number, tensor in enumerate(tensors):
        tensor.grad = draw(1000 * step + number, tensor.numel()).view(tensor.shape) * 0.1 + 0.3 * tensor.detach()


def run(optimizer: Any, tensors: list[torch.nn.Parameter], steps: range) -> None:
    for step in steps:
        give_gradients(tensors, step)
        optimizer.step()


@pytest.mark.parametrize("corrected", [False, True])
def test_the_warm_up_is_lamb(corrected: bool) -> None:
    tensors = make_tensors()
    weights = [tensor.detach().double() for tensor in tensors]
    m, v = [[torch.zeros_like(w) for w in weights] for _ in range(2)]
    optimizer = OneBitLamb(tensors, lr=0.02, freeze_step=None, weight_decay=0.1, bias_correction=corrected)
    for step in range(1, 41):
        give_gradients(tensors, step)
        for i, tensor in enumerate(tensors):
            assert tensor.grad is not None
            g = tensor.grad.double()
            m[i], v[i] = 0.9 * m[i] + 0.1 * g, 0.999 * v[i] + 0.001 * g * g
            by = (1 - 0.9**step, 1 - 0.999**step) if corrected else (1, 1)
            u = m[i] / by[0] / ((v[i] / by[1]).sqrt() + 1e-8) + 0.1 * weights[i]
            weights[i] = weights[i] - 0.02 * (weights[i].norm() / u.norm()).clamp(0.01, 10) * u
        optimizer.step()
        for tensor, expected in zip(tensors, weights, strict=True):
            torch.testing.assert_close(tensor.detach().double(), expected, atol=1e-6, rtol=1e-6)


def test_the_warm_up_is_adamw() -> None:
    ours, theirs = make_tensors(), make_tensors()
    settings: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99)}
    optimizer = OneBitAdam(ours, freeze_step=None, bias_correction=True, **settings)
    adam = torch.optim.AdamW(theirs, weight_decay=0.0, **settings)
    for step in range(30):
        give_gradients(ours, step)
        for mine, other in zip(ours, theirs, strict=True):
            other.grad = mine.grad
        optimizer.step()
        adam.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-6)


# The compressed stage


def test_the_compressed_stage_is_the_papers() -> None:
    freeze, decay, lr = 6, 0.1, 0.01
    tensors = make_tensors()
    optimizer = OneBitLamb(tensors, lr=lr, freeze_step=freeze, weight_decay=decay, coeff_beta=0.5)
    run(optimizer, tensors, range(freeze))
    state = [copy.deepcopy(optimizer.state[tensor]) for tensor in tensors]
    m, v = [s["exp_avg"] for s in state], [s["exp_avg_sq"] for s in state]
    fresh, last = [one.clone() for one in v], [1.0] * 3
    coeff = [float(s["coeff"] / (1 - 0.5 ** float(s["num_coeffs"]))) for s in state]
    roots = [float(one.square().mean().sqrt()) for one in m]
    scales = [float(np.mean(roots)) / root for root in roots]
    weights = [tensor.detach().clone() for tensor in tensors]
    sizes = [one.numel() for one in m]
    worker, server = Reference(sum(sizes)), Reference(sum(sizes))
    for step in range(freeze, freeze + 12):
        give_gradients(tensors, step)
        flat = [(0.9 * m[i] + 0.1 * t.grad) * scales[i] for i, t in enumerate(tensors)]  # type: ignore[operator]
        sent = torch.from_numpy(server(worker(torch.cat([one.flatten() for one in flat]).numpy())))
        for i, part in enumerate(sent.split(sizes)):
            new = part.view(m[i].shape) / scales[i]
            g = (new - 0.9 * m[i]) / 0.1
            m[i], fresh[i] = new, 0.999 * fresh[i] + 0.001 * g * g
            u0 = new / (v[i].sqrt() + 1e-8)
            u = u0 + decay * weights[i]
            factor = float(((v[i].sqrt() + 1e-8) / (fresh[i].sqrt() + 1e-8)).max())
            ratio = min(1.0, float(u0.norm() / u.norm()))
            factor = min(max(factor * ratio + 1 - ratio, 0.5), 4.0)
            last[i] = min(max(factor, 0.9 * last[i]), 1.1 * last[i])
            weights[i] = weights[i] - lr * coeff[i] * last[i] * u
        optimizer.step()
        for i, tensor in enumerate(tensors):
            torch.testing.assert_close(tensor.detach(), weights[i], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("factor", "last", "expected"),
    [
        (1.05, 1.0, 1.05),
        (1.5, 1.0, 1.1),  # no more than a tenth of the last
        (0.2, 1.0, 0.9),
        (9.0, 3.9, 4.0),  # the greatest
        (0.1, 0.52, 0.5),  # the least
        (9.0, 0.5, 0.55),
    ],
)
def test_the_factor_is_clipped(factor: float, last: float, expected: float) -> None:
    clipped = clip_factor(torch.tensor(factor), torch.tensor(last), 0.5, 4.0, 0.1)
    assert float(clipped) == pytest.approx(expected)


@pytest.mark.parametrize(("match_deepspeed", "share"), [(False, 1.0), (True, 1 - 0.9**3)])
def test_the_kept_coefficient_is_debiased(match_deepspeed: bool, share: float) -> None:
    """With lr 0 and equal gradients c is the same in all steps but for u, which depends on the step."""
    tensor = torch.nn.Parameter(torch.ones(16))
    optimizer = OneBitLamb([tensor], 0.01, 3, betas=(0.0, 0.0), max_coeff=0.5, match_deepspeed=match_deepspeed)
    for _ in range(3):  # u = 1, c = clip(1) = .5
        tensor.grad = torch.ones(16)
        optimizer.step()
    before = float(tensor.detach()[0])
    tensor.grad = torch.ones(16)
    optimizer.step()
    assert (before - float(tensor.detach()[0])) / 0.01 == pytest.approx(0.5 * share, rel=1e-3)


def test_masks_and_values_without_gradients_keep_still() -> None:
    masked, plain, unused = make_tensors()
    mask = torch.ones(5, 3)
    mask[3:] = 0
    groups: list[dict[str, Any]] = [{"params": [masked], "exp_avg_mask": mask}, {"params": [plain, unused]}]
    optimizer = OneBitLamb(groups, lr=0.01, freeze_step=4)
    start = [one.detach().clone() for one in (masked, plain, unused)]
    for step in range(12):
        give_gradients([masked, plain], step)
        assert masked.grad is not None
        assert plain.grad is not None
        masked.grad[3:] = 0
        plain.grad[2] = 0
        optimizer.step()
    assert torch.equal(masked[3:], start[0][3:])
    assert torch.equal(plain[2], start[1][2])
    assert torch.equal(unused, start[2])
    assert not torch.equal(masked[:3], start[0][:3])
    assert "exp_avg_mask" not in optimizer.state_dict()["param_groups"][0]
    assert all(torch.isfinite(one).all() for one in (masked, plain, unused))


@pytest.mark.parametrize("kind", [OneBitLamb, OneBitAdam])
def test_frozen_parameters_keep_still(kind: Any) -> None:
    tensors = make_tensors()
    tensors[1].requires_grad_(False)
    optimizer = kind(tensors, lr=0.01, freeze_step=2, weight_decay=0.1)
    start = [one.detach().clone() for one in tensors]
    for step in range(5):
        give_gradients([tensors[0], tensors[2]], step)
        optimizer.step()
    assert [torch.equal(one, before) for one, before in zip(tensors, start, strict=True)] == [False, True, False]


@pytest.mark.parametrize("kind", [OneBitLamb, OneBitAdam])
def test_tensors_without_a_gradient_in_the_warm_up_are_not_decayed(kind: Any) -> None:
    tensors = make_tensors()
    optimizer = kind(tensors, lr=0.01, freeze_step=2, weight_decay=0.1)
    start = tensors[1].detach().clone()
    for step in range(6):
        give_gradients(tensors if step == 4 else [tensors[0], tensors[2]], step)
        optimizer.step()
        assert torch.equal(tensors[1], start)
        tensors[1].grad = None
    restored = kind(tensors, lr=0.01, freeze_step=2, weight_decay=0.1)
    restored.load_state_dict(optimizer.state_dict())
    run(restored, tensors, range(6, 8))
    assert torch.equal(tensors[1], start)


def test_a_tensor_without_values_is_passed_over() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.zeros(0, 3))]
    optimizer = OneBitLamb(parameters, lr=0.1, freeze_step=2)
    for _ in range(4):
        sum((parameter * parameter).sum() for parameter in parameters).backward()  # type: ignore[union-attr]
        optimizer.step()
    assert (parameters[0] < 1).all()


def test_a_step_that_is_not_finite_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    tensors = make_tensors()
    optimizer = OneBitAdam(tensors, lr=0.01, freeze_step=3)
    run(optimizer, tensors, range(5))
    before = [tensor.detach().clone() for tensor in tensors]
    give_gradients(tensors, 5)
    assert tensors[1].grad is not None
    tensors[1].grad[0] = float("nan")
    optimizer.step()
    assert "step 6: the gradients of 1 of 1 ranks are not finite: the step is left out" in caplog.text
    assert optimizer.num_left_out == 1
    assert all(torch.equal(one, other) for one, other in zip(tensors, before, strict=True))
    run(optimizer, tensors, range(6, 9))
    assert all(torch.isfinite(one).all() and not torch.equal(one, o) for one, o in zip(tensors, before, strict=True))


def test_many_steps_in_a_row_that_are_not_finite_end_the_run() -> None:
    tensors = make_tensors()
    optimizer = OneBitAdam(tensors, lr=0.01, freeze_step=2)

    def step(number: int, is_finite: bool) -> None:
        give_gradients(tensors, number)
        if not is_finite:
            for tensor in tensors:
                assert tensor.grad is not None
                tensor.grad.fill_(torch.nan)
        optimizer.step()

    for number in range(2 * MAX_STEPS_LEFT_OUT):
        step(number, is_finite=number < 3 or number == MAX_STEPS_LEFT_OUT)
    with pytest.raises(ExchangeError, match=f"no rank had finite gradients in the last {MAX_STEPS_LEFT_OUT} steps"):
        step(2 * MAX_STEPS_LEFT_OUT, is_finite=False)


# Checkpoints


@pytest.mark.parametrize("kind", [OneBitLamb, OneBitAdam])
@pytest.mark.parametrize("at", [2, 5, 9], ids=["warm-up", "freeze", "compressed"])
def test_a_resumed_run_is_an_uninterrupted_one(kind: Any, at: int, caplog: pytest.LogCaptureFixture) -> None:
    whole, parted = make_tensors(), make_tensors()
    settings: dict[str, Any] = {"lr": 0.01, "freeze_step": 5, "weight_decay": 0.1}
    optimizer = kind(whole, **settings)
    run(optimizer, whole, range(14))
    first = kind(parted, **settings)
    run(first, parted, range(at))
    saved = copy.deepcopy(first.state_dict())
    second = kind(parted, **settings)
    second.load_state_dict(saved)
    run(second, parted, range(at, 14))
    assert all(torch.equal(one, other) for one, other in zip(whole, parted, strict=True))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_what_was_sent_by_a_checkpoint_is_in_the_next_line_of_the_log(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    (tmp_path / "checkpoint-3").mkdir()
    control = TrainerControl()

    def begin(state: TrainerState) -> tuple[OneBitAdam, OneBitCallback]:
        tensors = make_tensors()
        optimizer = OneBitAdam(tensors, lr=0.01, freeze_step=2)
        run(optimizer, tensors, range(3))
        callback = OneBitCallback(optimizer)
        model = torch.nn.ParameterList(tensors)
        callback.on_train_begin(args, state, control, optimizer=optimizer, model=model)
        return optimizer, callback

    def line(callback: OneBitCallback) -> float | None:
        logs = {"loss": 1.0}
        callback.on_log(args, TrainerState(), control, logs=logs)
        return logs.get("onebit/bytes_sent")

    optimizer, callback = begin(TrainerState())
    optimizer.bytes_sent += 100
    assert line(callback) == 100
    optimizer.bytes_sent += 10
    callback.on_save(args, TrainerState(global_step=3), control)
    assert line(callback) == 10
    optimizer, callback = begin(TrainerState(global_step=3))
    optimizer.bytes_sent += 5
    assert line(callback) == 10 + 5
    assert line(callback) is None


def test_errors_come_from_where_the_trainer_resumes(tmp_path: Path) -> None:
    def train(folder: str, resume: Path | None = None, **arguments: Any) -> torch.Tensor:
        torch.manual_seed(0)
        model = Linear()
        optimizer = OneBitAdam(model.parameters(), lr=0.01, freeze_step=2)
        args = TrainingArguments(
            str(tmp_path / folder), max_steps=6, use_cpu=True, report_to=[], lr_scheduler_type="constant", **arguments
        )
        data = [{"x": draw(i, 4), "y": torch.ones(1)} for i in range(48)]
        callbacks: list[TrainerCallback] = [OneBitCallback(optimizer)]
        trainer = Trainer(model, args, train_dataset=data, optimizers=(optimizer, None), callbacks=callbacks)
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    whole = train("first", save_steps=4)
    assert torch.equal(train("second", resume=tmp_path / "first" / "checkpoint-4"), whole)


def test_errors_of_another_number_of_ranks_are_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    tensors = make_tensors()
    optimizer = OneBitLamb(tensors, lr=0.01, freeze_step=3)
    run(optimizer, tensors, range(6))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["onebit_errors"]["num_ranks"] = 4
    optimizer.load_state_dict(saved)
    assert not any(error.any() for error in optimizer.errors.values())
    run(optimizer, tensors, range(6, 8))
    assert caplog.text.count("1-bit errors begin at zero: the checkpoint is of 4 ranks, and this run has 1") == 1


def test_another_freeze_step_is_refused() -> None:
    tensors = make_tensors()
    optimizer = OneBitLamb(tensors, lr=0.01, freeze_step=3)
    run(optimizer, tensors, range(4))
    other = OneBitLamb(make_tensors(), lr=0.01, freeze_step=8)
    with pytest.raises(
        ConfigError, match="freeze_step=8, but the checkpoint of step 4 was written with freeze_step=3"
    ):
        other.load_state_dict(optimizer.state_dict())


# Refusals


def test_a_warm_up_of_one_step_is_refused() -> None:
    with pytest.raises(ConfigError, match="freeze_step=1: the second moments need a warm-up"):
        OneBitLamb(make_tensors(), lr=0.01, freeze_step=1)


def test_half_precision_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"type torch\.bfloat16 cannot be trained"):
        OneBitAdam([torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))], lr=0.01, freeze_step=5)


def test_sparse_gradients_and_parameters_that_come_later_are_refused() -> None:
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    optimizer = OneBitLamb(embedding.parameters(), lr=0.01, freeze_step=2)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(UnsupportedError, match="sparse=False"):
        optimizer.step()
    with pytest.raises(UnsupportedError, match="give all when it is made"):
        optimizer.add_param_group({"params": make_tensors()})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["deepspeed={zero_optimization: {stage: 2}}"], "deepspeed=.* cannot be used: it averages gradients itself"),
        (["deepspeed=null", "training.fp16=true"], "fp16=True cannot be used: its loss scaling skips a step"),
        (["deepspeed=null", "diloco.sync_every=1"], "sync_every=1 cannot be used: the 1-bit all-reduce is between"),
        (["deepspeed=null", "training.optim=adamw_torch"], "optim='adamw_torch' cannot be used: the block"),
        (["deepspeed=null", "training.optim_args=eps=1"], "optim_args='eps=1' cannot be used: it belongs"),
        (["deepspeed=null", "optimizer.freeze_step=1"], "freeze_step=1: the second moments need"),
        (["deepspeed=null", "optimizer.factor_min=5"], r"factor_min=5\.0 is above factor_max=4\.0"),
        (["deepspeed=null", "optimizer.name=onebit_adam", "optimizer.factor_min=1"], "only onebit_lamb has it"),
    ],
)
def test_a_run_file_refuses(overrides: list[str], message: str) -> None:
    file = ROOT / "configs" / "quickstart.yaml"
    given = ["optimizer.name=onebit_lamb", "optimizer.freeze_step=100", *overrides]
    with pytest.raises(ConfigError, match=message):
        load_run_file(file, given)


def test_a_run_file_with_an_island_that_synchronises_seldom() -> None:
    given = ["optimizer.name=onebit_lamb", "optimizer.freeze_step=100", "deepspeed=null"]
    optimizer = load_run_file(ROOT / "configs" / "quickstart.yaml", given).optimizer
    assert optimizer is not None
    assert optimizer.of_method()["coeff_beta"] == 0.9


def test_a_callback_of_other_things() -> None:
    wrong: Any = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(TypeError, match="optimizer is a SGD: give the Trainer's OneBitAdam or OneBitLamb"):
        OneBitCallback(wrong)
    payload: Any = "int8"
    optimizer = OneBitAdam([torch.nn.Parameter(torch.ones(1))], lr=0.1, freeze_step=2)
    with pytest.raises(ConfigError, match=r"OneBitCallback\(warmup_payload='int8'\): give fp32 or fp16"):
        OneBitCallback(optimizer, payload)
