"""The trace predicts a repeating sequence; a deviation raises no exception, and the trace keeps what it knows."""

from __future__ import annotations

from trainer_client.training.step.trace import FORGOTTEN_AFTER, Clock, Trace

STEP = [0, 1, 2, 3, 3, 2, 1]


def trained(*steps: list[int]) -> Trace:
    trace = Trace(Clock())
    for step in steps or (STEP,):
        for unit in step:
            trace.use(unit)
        trace.end()
    return trace


def upcoming(trace: Trace) -> list[int]:
    return [unit for unit, _ in trace.upcoming()]


def test_a_new_trace_expects_nothing() -> None:
    trace = Trace(Clock())
    trace.use(0)

    assert (upcoming(trace), trace.next_unit(), trace.next_use(0)) == ([], None, None)


def test_what_comes_next_is_what_came_last_time() -> None:
    trace = trained()
    for index, unit in enumerate(STEP):
        assert trace.next_unit() == unit
        trace.use(unit)
        assert upcoming(trace) == STEP[index + 1 :]


def test_predicted_positions_are_those_of_the_uses() -> None:
    trace = trained()
    now = trace.use(0)
    predicted = dict(zip(range(1, len(STEP)), trace.upcoming(), strict=True))
    for index in range(1, len(STEP)):
        unit, position = predicted[index]
        assert trace.use(unit) == position == now + index


def test_next_use_is_in_this_step_or_in_the_next_one() -> None:
    trace = trained()
    now = trace.use(0)

    assert trace.next_use(2) == now + 2
    assert trace.next_use(0) == now + len(STEP)


def test_skipped_units_move_the_cursor_on() -> None:
    trace = trained()
    for unit in (0, 3):
        trace.use(unit)

    assert upcoming(trace) == [3, 2, 1]


def test_an_unexpected_unit_leaves_the_expectation_alone() -> None:
    trace = trained()
    for unit in (0, 1, 7, 1):
        trace.use(unit)
    # The trace takes the second use of 1 for the use at the end of backward, so it expects no further use.
    assert upcoming(trace) == []

    trace.end()
    assert [unit for unit in upcoming(trace) if unit in (0, 1, 7)] == [0, 1, 7, 1]


def test_a_unit_that_is_not_used_in_a_step_keeps_its_place() -> None:
    trace = trained(STEP, [0, 1, 3, 3, 1])
    assert upcoming(trace) == STEP

    trace.use(0)
    trace.use(1)
    assert trace.next_unit() == 2
    trace.use(3)
    assert upcoming(trace) == [3, 2, 1], "2 was skipped once more, and comes back in backward"


def test_a_unit_that_comes_back_is_expected_as_it_was_used_last() -> None:
    trace = trained(STEP, [0, 1, 3, 3, 1], [0, 1, 3, 3, 2, 1])

    assert upcoming(trace) == [0, 1, 3, 3, 2, 1]


def test_a_unit_that_is_not_used_any_more_is_forgotten() -> None:
    without = [0, 1, 3, 3, 1]
    assert 2 in upcoming(trained(STEP, *[without] * (FORGOTTEN_AFTER - 1)))
    assert upcoming(trained(STEP, *[without] * FORGOTTEN_AFTER)) == without


def test_units_before_all_others_and_alternating_ones_keep_their_places() -> None:
    trace = trained([5, 0, 1, 2], [0, 1, 3], [0, 1, 2], [0, 1, 3])

    assert upcoming(trace) == [5, 0, 1, 2, 3] or upcoming(trace) == [5, 0, 1, 3, 2]


def test_the_next_repetition_follows_the_rest_of_this_one() -> None:
    trace = trained()
    now = [trace.use(unit) for unit in STEP[:5]][-1]

    following = [*trace.upcoming(), *trace.after_end()]
    assert [unit for unit, _ in following] == [2, 1, *STEP]
    assert [position for _, position in following] == list(range(now + 1, now + 10))


def test_a_unit_is_expected_as_long_as_it_comes_in_the_rest() -> None:
    trace = trained()
    trace.use(0)
    assert [trace.expects(unit) for unit in (0, 1, 2, 3, 7)] == [False, True, True, True, False]


def test_after_a_sequence_amid_another_one_the_other_goes_on() -> None:
    clock = Clock()
    training = Trace(clock)
    inference = Trace(clock, amid=training)
    for unit in STEP:
        training.use(unit)
    training.end()

    now = inference.use(2)
    assert (inference.next_use(2), inference.next_use(9)) == (now + 3, None), "in the training step"
    inference.use(9)
    inference.end()
    assert inference.next_use(2) == clock.now + 1, "in another one of its own kind"
    assert training.next_use(9) is None
    assert (training.ends_in_update, inference.ends_in_update) == (True, False)


def test_a_repetition_without_a_use_changes_nothing() -> None:
    trace = trained()
    trace.end()

    assert upcoming(trace) == STEP


def test_positions_grow_over_traces_that_share_a_clock() -> None:
    clock = Clock(100)
    training, inference = Trace(clock), Trace(clock)

    assert [training.use(0), inference.use(0), training.use(1)] == [101, 102, 103]


def test_a_use_after_the_next_one_may_come_after_an_update() -> None:
    trace = trained()
    now = trace.use(0)
    following = dict(trace.upcoming())[1]

    # STEP is 0 1 2 3 3 2 1: unit 2 now + 2 and now + 5, unit 1 now + 1 and now + 6, unit 0 in the next step again.
    assert trace.use_after(2, now + 2, before_update=True) == now + 5
    assert trace.use_after(2, now + 5, before_update=True) is None
    assert trace.use_after(2, now + 5, before_update=False) == now + len(STEP) + 2
    assert (following, trace.use_after(1, now + 1, before_update=True)) == (now + 6, now + 6)
    assert trace.use_after(0, now, before_update=True) is None
    assert trace.use_after(0, now, before_update=False) == trace.next_use(0)
    assert trace.use_after(9, now, before_update=False) is None
    # Unit 3 stays gathered between its two uses, so its bytes are not read again before the next step.
    assert trace.use_after(3, now + 3, before_update=True) is None
    assert trace.use_after(3, now + 3, before_update=False) == now + len(STEP) + 3


def test_no_update_comes_between_two_forwards_without_gradients() -> None:
    trace = Trace(Clock(), amid=Trace(Clock()))
    for unit in (0, 1):
        trace.use(unit)
    trace.end()
    now = trace.use(0)

    assert trace.use_after(0, now, before_update=True) == now + 2
