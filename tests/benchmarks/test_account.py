"""The account of a round, on made-up kernels: all but the profiler itself runs without a GPU."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import account
from account import Bytes, Kernel, kernel_class, kernels_of, step_cost, union

RELU = "void at::native::vectorized_elementwise_kernel<4, at::native::launch_clamp_scalar(...)::{lambda(float)#1}>"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sm80_xmma_fprop_implicit_gemm_indexed_tf32f32_nhwckrsc_nhwc_tilesize128x64x32_stage4", account.MATRIX),
        ("void cutlass__5x_cudnn::Kernel<cutlass_tensorop_s1688wgrad_optimized_tf32_128x64_32x5>", account.MATRIX),
        ("nvjet_tst_64x8_64x16_1x2_h_bz_TNN", account.MATRIX),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", account.MATRIX),
        ("void cudnn::cnn::wgrad_alg0_engine<float, 128, 5, 5, 3>", account.MATRIX),
        ("void gemv2T_kernel_val<int, int, float>", account.MATRIX),
        ("void cudnn::bn_fw_tr_1C11_singleread<float, 512, true>", account.NORMALISATION),
        ("void cudnn::batchnorm_bwtr_nhwc_semiPersist<__half, float>", account.NORMALISATION),
        ("void at::native::batch_norm_backward_elemt_channels_last_kernel<4, float>", account.NORMALISATION),
        ("triton_red_fused__native_batch_norm_legit_functional_0", account.NORMALISATION),
        ("standardise_forward", account.NORMALISATION),
        ("void at::native::(anonymous namespace)::max_pool_backward_nhwc<float, int>", account.POOLING),
        ("triton_poi_fused_convolution_relu_3", account.ELEMENTWISE),
        (RELU, account.ELEMENTWISE),
        ("void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true>", account.COPY),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(...)>", account.COPY),
        ("Memcpy DtoD (Device -> Device)", account.COPY),
        ("void at::native::indexSelectLargeIndex<unsigned char, long, unsigned int, 2>", account.COPY),
        ("void at::native::multi_tensor_apply_kernel<at::native::Copy<float, float>>", account.COPY),
        ("void at::native::multi_tensor_apply_kernel<FusedSgdMathFunctor<float, 3>>", account.OPTIMISER),
        ("void at::native::multi_tensor_apply_kernel<LpNormFunctor<float>>", account.OPTIMISER),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, MeanOps>>", account.REDUCTION),
        ("void at::native::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>", account.REDUCTION),
        ("void something_unheard_of<float>", account.OTHER),
    ],
)
def test_a_kernel_is_classified_by_its_name(name: str, kind: str) -> None:
    assert kernel_class(name) == kind


def test_every_kernel_of_our_own_has_a_class() -> None:
    sources = (Path(__file__).parents[2] / "src" / "fedkeel" / "nn" / "kernels").glob("triton_*.py")
    text = "\n".join(path.read_text() for path in sources)
    names = set(re.findall(r"^def ([a-z]\w*)\(", text, re.MULTILINE)) - {
        "combined_moments",
        "total_of",
    }  # parts of others
    assert len(names) > 4
    assert {name for name in names if kernel_class(name) not in (account.NORMALISATION, account.POOLING)} == set()


def test_the_union_counts_a_moment_once_however_many_kernels_run_in_it() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, 200, (40, 2), generator=generator).tolist()
    kernels = [Kernel("k", start, duration % 20, 0) for start, duration in drawn]
    running = {moment for k in kernels for moment in range(int(k.start), int(k.start + k.duration))}
    assert union(kernels) == len(running)
    assert union([]) == 0


def test_an_account_adds_up_times_shares_and_calls() -> None:
    kernels = [
        Kernel("sgemm", 100.0, 30.0, 7),
        Kernel("sgemm", 110.0, 10.0, 8),
        Kernel(RELU, 150.0, 20.0, 7),
        Kernel("nll_loss", 160.0, 20.0, 8),
    ]
    made = account.account(kernels, steps=2, wall=0.2)
    assert made.kernels == 4
    assert made.kernels_per_step == 2
    assert made.kernel_time == pytest.approx(0.080)
    assert made.busy == pytest.approx(0.060)  # 100 to 130, 150 to 180
    assert made.span == pytest.approx(0.080)
    assert made.busy_fraction == pytest.approx(0.3)
    assert made.concurrency == pytest.approx(80 / 60)
    assert made.median_microseconds == 20
    assert made.streams == 2
    assert [(g.name, g.calls, round(g.share, 3)) for g in made.classes] == [
        (account.MATRIX, 2, 0.5),
        (account.ELEMENTWISE, 1, 0.25),
        (account.REDUCTION, 1, 0.25),
    ]
    assert made.top[0].name == "sgemm"
    assert made.top[0].microseconds == pytest.approx(20)


def test_the_twelve_longest_are_named() -> None:
    kernels = [Kernel(f"k{i}", 100.0 * i, float(i + 1), 0) for i in range(30)]
    top = account.account(kernels, steps=1, wall=1.0).top
    assert [group.name for group in top] == [f"k{i}" for i in range(29, 17, -1)]


def test_only_what_ran_on_the_gpu_is_read_from_a_trace() -> None:
    trace: dict[str, Any] = {
        "traceEvents": [
            {"ph": "M", "name": "process_name", "args": {}},
            {"ph": "X", "cat": "cpu_op", "name": "aten::add", "ts": 1, "dur": 50},
            {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 2, "dur": 9},
            {"ph": "X", "cat": "gpu_user_annotation", "name": "step", "ts": 2, "dur": 90},
            {"ph": "X", "cat": "kernel", "name": "sgemm", "ts": 10.5, "dur": 2.25, "args": {"stream": 23}},
            {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 13, "dur": 1, "args": {"stream": 7}},
            {"ph": "X", "cat": "gpu_memset", "name": "Memset", "ts": 15, "dur": 1, "args": {"stream": 7}},
        ]
    }
    assert kernels_of(trace) == [
        Kernel("sgemm", 10.5, 2.25, 23),
        Kernel("Memcpy HtoD", 13.0, 1.0, 7),
        Kernel("Memset", 15.0, 1.0, 7),
    ]


def moved(operation: Any) -> int:
    with Bytes() as counter:
        operation()
    return counter.total


def test_an_operation_moves_its_arguments_and_its_result() -> None:
    x, y = torch.ones(10, 4), torch.ones(10, 4)
    assert moved(lambda: x + y) == 3 * 160
    assert moved(lambda: x.add_(y)) == 3 * 160  # read x, read y, write x
    assert moved(lambda: torch.relu(x)) == 2 * 160
    assert moved(lambda: x.to(torch.bfloat16)) == 160 + 80
    assert moved(lambda: torch._foreach_mul_([x, y], 2.0)) == 4 * 160


def test_a_view_and_set_aside_memory_move_nothing_and_a_repeated_row_lies_there_once() -> None:
    x = torch.ones(10, 4)
    assert moved(lambda: x.view(4, 10)[1:].t().expand(2, -1, -1)) == 0
    assert moved(lambda: torch.empty(1000)) == 0
    assert moved(lambda: torch.ones(4).expand(10, 4) + x) == 16 + 16 + 160 + 160  # the ones are written, then read


def test_the_cost_of_a_step_is_that_of_its_layers() -> None:
    """The tiny network: a 3x3 convolution from 3 to 4 channels on 8x8, a linear layer from 16 to 4."""
    setup = tiny.setup(on=tiny.federation({"ward": 16}))
    cost = step_cost(setup, 4)
    convolution, linear = 2 * 4 * 64 * 4 * 27, 2 * 4 * 16 * 4
    # Forward and both gradients; the image itself needs none.
    assert cost.flops == 2 * convolution + 3 * linear
    assert cost.moved > 4 * 4 * (3 + 4 * 5) * 64  # at least the image once, and the activations five times


def test_a_second_forward_is_counted() -> None:
    options = {"on": tiny.federation({"ward": 16})}
    plain, paired = (step_cost(tiny.setup(method, **options), 4) for method in ("fedavg", "greg"))
    assert plain.flops < paired.flops < 2.01 * plain.flops
    assert paired.moved > plain.moved


def test_the_text_states_the_floors_as_shares_of_the_round() -> None:
    made = account.account([Kernel("sgemm", 0.0, 400.0, 1)], steps=10, wall=1.0)
    cost = account.Cost(flops=1_000_000_000, moved=10_000_000)
    text = "\n".join(
        account.lines("row", made, cost, plain_wall=0.5, steps=10, peak=100.0, bandwidth=1.0)
    )  # 10 GFLOP at 100 TFLOP/s: 0.1 ms of 0.5; 100 MB at 1 TB/s: 0.1 ms of 0.5
    assert text.count("0.10 ms   20.0 % of the round") == 2
    assert "20,000 steps/s" in text
    assert "busy 40 %" in text
    assert "100.0%      0.40         0.1    400.0  [convolution] sgemm" in text
