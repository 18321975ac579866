"""Step times, and the files of metrics."""

import json
import time

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from trainer.errors import RunError
from trainer.metrics import WARM_UP_STEPS, MetricsLog, StepClock


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves by hand."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def after(seconds):
        now[0] += seconds

    return StepClock(_last=100.0), after


def run(clock, after, times):
    for seconds in times:
        after(seconds)
        clock.completed()


def test_warm_up_steps_are_told_apart_and_left_out(clock):
    clock, after = clock
    after(9.0)
    assert clock.completed() == (pytest.approx(9.0), True)
    after(5.0)
    assert clock.completed() == (pytest.approx(5.0), True)
    after(1.0)
    assert clock.completed() == (pytest.approx(1.0), False)
    assert WARM_UP_STEPS == 2
    assert clock.median == clock.p90 == pytest.approx(1.0)
    assert clock.total == pytest.approx(15.0) and clock.steps == 3


def test_median_and_percentile_lie_among_the_measured(clock):
    clock, after = clock
    run(clock, after, [9, 9, *range(1, 12)])
    assert clock.median == pytest.approx(6) and clock.p90 == pytest.approx(10)


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_warm_up_alone_gives_no_step_time(clock, num_steps):
    clock, after = clock
    run(clock, after, [1.0] * num_steps)
    assert clock.median is None and clock.p90 is None


def test_restart_leaves_out_what_lies_between_steps(clock):
    clock, after = clock
    run(clock, after, [1.0, 1.0, 1.0])
    after(60.0)
    clock.restart()
    after(2.0)
    assert clock.completed() == (pytest.approx(2.0), False)
    assert clock.total == pytest.approx(5.0)


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def write(folder, start, steps, tensorboard=False):
    log = MetricsLog(folder, start, tensorboard)
    for step in steps:
        log.write({"step": step, "loss": float(step), "memory_bytes": None, "by_layer": [1, 2]}, to_board=True)
    log.close()


def test_each_step_is_on_the_disk_when_it_is_written(tmp_path):
    log = MetricsLog(tmp_path, 0, tensorboard=False)
    log.write({"step": 1}, to_board=False)
    assert lines(tmp_path) == [{"step": 1}]
    log.close()


@pytest.mark.parametrize("start", [0, 1, 3, 5])
def test_a_resumed_run_forgets_the_steps_it_does_again(tmp_path, start):
    write(tmp_path, 0, range(1, 6))
    write(tmp_path, start, range(start + 1, 8))
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 8))


@pytest.mark.parametrize("rest", ["", '{"step": 3, "lo', '{"step": 3, "loss": 1.0', "\0\0\0", "[]\n", '{"loss": 1}\n'])
def test_a_line_cut_off_by_a_crash_is_dropped(tmp_path, rest):
    write(tmp_path, 0, [1, 2])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(rest)
    write(tmp_path, 2, [3, 4])
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]


def test_numbers_that_are_none_are_null(tmp_path):
    log = MetricsLog(tmp_path, 0, tensorboard=False)
    log.write({"step": 1, "loss": float("nan"), "x": [float("inf"), 1.0], "memory_bytes": None}, to_board=False)
    log.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text == '{"step": 1, "loss": null, "x": [null, 1.0], "memory_bytes": null}\n'


def test_a_full_disk_ends_the_run_with_the_path(tmp_path):
    log = MetricsLog(tmp_path, 0, tensorboard=False)
    log.close()
    log._file = open("/dev/full", "w")
    with pytest.raises(RunError, match="metrics.jsonl: cannot be written: No space left on device"):
        log.write({"step": 1}, to_board=False)
    with pytest.raises(OSError):
        log.close()  # what it holds still finds no room


def events(path):
    """The records of a TensorBoard file: length, checksum, event, checksum."""
    data, found = path.read_bytes(), []
    while data:
        size = int.from_bytes(data[:8], "little")
        found.append(Event.FromString(data[12 : 12 + size]))
        data = data[16 + size :]
    return found


def test_tensorboard_gets_scalars_and_is_told_what_is_done_again(tmp_path):
    write(tmp_path, 0, [1, 2, 3], tensorboard=True)
    write(tmp_path, 2, [3], tensorboard=True)
    files = sorted((tmp_path / "tensorboard").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert len(files) == 2  # even within one second
    first, second = (events(path) for path in files)
    assert [(e.step, v.tag, v.simple_value) for e in first for v in e.summary.value] == [
        (1, "loss", 1.0), (2, "loss", 2.0), (3, "loss", 3.0)
    ]  # fmt: skip
    starts = [e.step for e in second if e.session_log.status == SessionLog.START]
    assert starts == [3]  # TensorBoard then leaves out steps from 3 on of earlier files
    assert [(e.step, v.simple_value) for e in second for v in e.summary.value] == [(3, 3.0)]


def test_without_tensorboard_there_is_no_folder(tmp_path):
    write(tmp_path, 0, [1])
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl"}
