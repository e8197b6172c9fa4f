"""The timer that scripts read counts epochs, micro-batches and steps, and the samples of a second."""

from __future__ import annotations

import math

from trainer_client.training.report.throughput import ThroughputTimer


def test_the_rate_is_that_of_the_steps_after_the_second() -> None:
    timer = ThroughputTimer()
    for number in range(4):
        assert math.isinf(timer.avg_samples_per_sec()) == (number < 3)
        timer.end_micro_batch()
        timer.end_step(8)

    assert timer.avg_samples_per_sec() == 16 / timer.total_elapsed_time
    assert (timer.global_step_count, timer.micro_step_count) == (4, 4)


def test_an_epoch_begins_its_own_count_of_micro_batches() -> None:
    timer = ThroughputTimer()
    timer.end_micro_batch()

    timer.update_epoch_count()
    timer.end_micro_batch()

    assert (timer.epoch_count, timer.micro_step_count, timer.global_step_count) == (1, 1, 0)
