"""Degrees of the mesh and arithmetic of the batch."""

import itertools
import math
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from trainer.config import Config, load
from trainer.errors import ConfigError
from trainer.parallel import AXIS_KEYS, Degrees, batch_shape, divisors, largest_divisor, resolve_degrees

TINY = load(Path(__file__).parent.parent / "configs/models/deepseek_v4_tiny.yml").config


def cpu(devices: int, data: int, fsdp: int, expert: int, tensor: int) -> Config:
    return replace(mesh(data, fsdp, expert, tensor), hardware="cpu", num_cpu_devices=devices)


def mesh(data: int, fsdp: int, expert: int, tensor: int) -> Config:
    return replace(TINY, **dict(zip(AXIS_KEYS.values(), (data, fsdp, expert, tensor), strict=True)))


def message(function, *arguments) -> str:
    with pytest.raises(ConfigError) as error:
        function(*arguments)
    return str(error.value)


def test_degrees():
    degrees = Degrees(data=2, fsdp=3, expert=5, tensor=7)
    assert (degrees.product, degrees.batch_shards) == (210, 30)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((1, 2, 4, 1), (1, 2, 4, 1)),
        ((1, 2, -1, 1), (1, 2, 4, 1)),
        ((1, -1, 1, 1), (1, 8, 1, 1)),
        ((2, 1, 1, -1), (2, 1, 1, 4)),
        ((-1, 2, 2, 1), (2, 2, 2, 1)),
        ((1, -1, 8, 1), (1, 1, 8, 1)),
    ],
)
def test_the_rest(given, expected):
    assert resolve_degrees(cpu(8, *given)) == Degrees(*expected)
    assert resolve_degrees(mesh(*given), 8) == Degrees(*expected)


@pytest.mark.parametrize(
    "given",
    [(1, -1, -1, 1), (1, 3, -1, 1), (1, 0, 8, 1), (1, 2, 2, 1), (1, 16, 8, 1), (1, 1, 1, 1), (2, 2, 2, 2),
     (1, -2, 4, 1), (1, 5, 7, 3), (-1, -1, -1, -1), (1, 16, -1, 1)],
)  # fmt: skip
def test_impossible_meshes_name_everything_and_a_valid_completion(given):
    text = message(resolve_degrees, cpu(8, *given))
    product = math.prod(degree for degree in given if degree != -1)
    for key, degree in zip(AXIS_KEYS.values(), given, strict=True):
        assert f"{key}={degree} " in text.replace(";", " ")
    assert f"product {'without the -1: ' if -1 in given else ''}{product};" in text
    assert "devices: 8 (num_cpu_devices)" in text
    changes = dict(re.findall(r"(\w+_parallelism)=(\d+)", text.split("valid: ")[1]))
    fixed = replace(cpu(8, *given), **{key: int(degree) for key, degree in changes.items()})
    assert resolve_degrees(fixed).product == 8


def test_the_message_in_full():
    assert message(resolve_degrees, cpu(8, 1, 2, 2, 1)) == (
        "the mesh and the devices differ in number: dcn_data_parallelism=1 x ici_fsdp_parallelism=2 x "
        "ici_expert_parallelism=2 x ici_tensor_parallelism=1; product 4; devices: 8 (num_cpu_devices); "
        "valid: ici_fsdp_parallelism=4, or num_cpu_devices=4"
    )
    assert message(resolve_degrees, mesh(1, -1, 3, 1), 128) == (
        "the fixed degrees don't divide the devices: dcn_data_parallelism=1 x ici_fsdp_parallelism=-1 x "
        "ici_expert_parallelism=3 x ici_tensor_parallelism=1; product without the -1: 3; devices: 128; "
        "valid: ici_fsdp_parallelism=64 ici_expert_parallelism=2"
    )


def test_unknown_number_of_devices():
    assert resolve_degrees(mesh(2, 1, 16, 8)).product == 256
    assert message(resolve_degrees, mesh(1, -1, 2, 1)) == (
        "ici_fsdp_parallelism=-1 is the rest of the devices, and their number is not known here"
    )
    assert "only one degree may be -1" in message(resolve_degrees, mesh(1, -1, -1, 1))
    assert "a degree is at least 1" in message(resolve_degrees, mesh(1, -1, 0, 1))


def test_on_the_cpu_its_own_count_holds():
    assert resolve_degrees(cpu(8, 1, -1, 1, 1), 128).product == 8


def test_divisors():
    for number in range(1, 200):
        assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]
    assert largest_divisor(128, 100) == 64
    assert largest_divisor(7, 6) == 1


def test_divisors_of_an_absurd_number_end():
    assert {1, 2, 2**59, 2**60} <= set(divisors(2**60))


# The batch.

POD = Degrees(data=1, fsdp=1, expert=16, tensor=8)


def batch(per_device: float, degrees: Degrees = POD, accumulation: int = 1, length: int = 16_384):
    config = replace(TINY, per_device_batch_size=per_device, gradient_accumulation_steps=accumulation,
                     max_target_length=length)  # fmt: skip
    return batch_shape(config, degrees)


def test_the_pods_batch():
    shape = batch(0.125)
    assert (shape.rows, shape.global_batch, shape.tokens_per_step, shape.rows_per_shard) == (16, 16, 262_144, 1)
    assert str(shape) == "global_batch=16 (16 rows x 1 accumulation) tokens/step=262144 rows/batch-shard=1"
    shape = batch(0.25, accumulation=3)
    assert str(shape) == "global_batch=96 (32 rows x 3 accumulation) tokens/step=1572864 rows/batch-shard=2"


@pytest.mark.parametrize(
    ("per_device", "devices", "rows"),
    [
        (0.1, 30, 3),
        (0.1, 10, 1),
        (0.7, 10, 7),
        (0.3, 10, 3),
        (1 / 96, 96, 1),
        (1 / 3, 3, 1),
        (2 / 3, 9, 6),
        (1e-3, 1000, 1),
    ],
)
def test_fractions_that_binary_floats_cannot_hold(per_device, devices, rows):
    assert batch(per_device, Degrees(1, 1, 1, devices)).rows == rows


@pytest.mark.parametrize("rows", range(1, 33))
def test_every_fraction_of_32_devices(rows):
    assert batch(rows / 32, Degrees(1, 1, 1, 32)).rows == rows


def test_a_batch_of_no_whole_number_is_refused():
    assert message(batch, 0.1) == (
        "per_device_batch_size=0.1 x 128 = 12.8 is not a whole number (of rows, over all devices); "
        "nearest per_device_batch_size that work: 0.125 (16 rows) or 0.25 (32 rows)"
    )
    assert "0.0625 x 8 = 0.5 is not a whole number" in message(batch, 0.0625, Degrees(1, 1, 1, 8))
    assert "0.005 x 128 = 0.64 is not a whole number" in message(batch, 0.005)
    assert "work: 1.0 (1 row) or 2.0 (2 rows)" in message(batch, 0.3, Degrees(1, 1, 1, 1))


def test_a_batch_that_its_shards_do_not_divide_is_refused():
    assert message(batch, 12 / 128) == (
        "per_device_batch_size=0.09375 x 128 = 12: 12 rows don't divide into 16 batch shards (dcn_data_parallelism 1 x "
        "ici_fsdp_parallelism 1 x ici_expert_parallelism 16); nearest per_device_batch_size that work: "
        "0.125 (16 rows) or 0.25 (32 rows)"
    )
    assert "16 rows don't divide into 128 batch shards" in message(batch, 0.125, Degrees(1, 8, 16, 1))
    assert "0 rows don't divide" in message(batch, 1e-12)


@pytest.mark.parametrize("degrees", [POD, Degrees(2, 3, 1, 1), Degrees(1, 7, 1, 3), Degrees(1, 1, 1, 96)])
@pytest.mark.parametrize("per_device", [0.01, 0.11, 0.3, 1.7, 5.3])
def test_the_nearest_values_work_and_none_is_nearer(degrees, per_device):
    works = [float(size) for size in re.findall(r"([\d.e-]+) \(\d+ rows?\)", message(batch, per_device, degrees))]
    assert len(works) == 2
    rows = [batch(size, degrees).rows for size in works]
    assert rows[1] - rows[0] == degrees.batch_shards
    exact = Fraction(str(per_device)) * degrees.product
    assert rows[0] == degrees.batch_shards or rows[0] < exact < rows[1]


def test_batch_shards_are_data_fsdp_and_expert():
    for data, fsdp, expert in itertools.product((1, 2), repeat=3):
        degrees = Degrees(data, fsdp, expert, tensor=4)
        shape = batch(data * fsdp * expert / degrees.product, degrees)
        assert (shape.rows_per_shard, shape.rows) == (1, data * fsdp * expert)
