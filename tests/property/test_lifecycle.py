"""What must hold of the lifecycle table whatever is written into it, and of walks through it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.model.errors import Conflict
from agentenv.model.lifecycle import TRANSITIONS, Event, State, next_state

REQUESTS = {Event.PAUSE, Event.RESUME, Event.SNAPSHOT, Event.FORK}
OUTCOMES = {Event.DONE, Event.ROLLED_BACK, Event.LOST}
TRANSITIONAL = [state for state in State if not state.is_settled]
ALIVE = [state for state in State if state is not State.GONE]


def _reachable(start: State) -> set[State]:
    reached = {start}
    while more := {after for state in reached for after in TRANSITIONS[state].values()} - reached:
        reached |= more
    return reached


def test_every_state_has_a_row_and_no_row_is_of_anything_else() -> None:
    assert set(TRANSITIONS) == set(State)


@pytest.mark.parametrize("state", ALIVE)
def test_every_sandbox_can_be_deleted_in_the_end(state: State) -> None:
    assert State.GONE in _reachable(state)


@pytest.mark.parametrize("state", ALIVE)
def test_a_kill_is_taken_in_every_state_and_leads_to_killing(state: State) -> None:
    assert next_state(state, Event.KILL) is State.KILLING


def test_what_is_being_killed_only_goes() -> None:
    assert _reachable(State.KILLING) == {State.KILLING, State.GONE}


@pytest.mark.parametrize("event", Event)
def test_what_is_gone_takes_nothing(event: Event) -> None:
    with pytest.raises(Conflict):
        next_state(State.GONE, event)


@pytest.mark.parametrize("state", TRANSITIONAL)
def test_every_transitional_state_has_a_successor_for_success(state: State) -> None:
    assert TRANSITIONS[state][Event.DONE].is_settled


@pytest.mark.parametrize("state", [state for state in TRANSITIONAL if state is not State.KILLING])
def test_every_transitional_state_has_a_successor_for_failure(state: State) -> None:
    """Killing has none on purpose: it is tried until it is done."""
    assert TRANSITIONS[state][Event.LOST] in (State.ERROR, State.KILLING)


@pytest.mark.parametrize("state", TRANSITIONAL)
def test_no_request_but_a_kill_is_taken_while_an_operation_runs(state: State) -> None:
    assert not REQUESTS & TRANSITIONS[state].keys()


@pytest.mark.parametrize("state", [State.RUNNING, State.PAUSED])
def test_what_is_rolled_back_is_where_it_was(state: State) -> None:
    for request in REQUESTS & TRANSITIONS[state].keys():
        assert TRANSITIONS[TRANSITIONS[state][request]][Event.ROLLED_BACK] is state


@pytest.mark.parametrize("state", ALIVE)
def test_only_an_explicit_delete_or_a_create_that_failed_destroys_data(state: State) -> None:
    for event, after in TRANSITIONS[state].items():
        if after in (State.KILLING, State.GONE) and state is not State.KILLING:
            assert event is Event.KILL or (state, event) == (State.CREATING, Event.LOST)


@pytest.mark.parametrize("state", [state for state in State if state.has_guest])
def test_a_guest_that_may_run_may_be_lost(state: State) -> None:
    assert TRANSITIONS[state][Event.LOST] is State.ERROR


def test_an_error_is_left_only_by_a_kill() -> None:
    assert set(TRANSITIONS[State.ERROR].values()) == {State.KILLING, State.ERROR}


@pytest.mark.parametrize("state", [state for state in ALIVE if state is not State.CREATING])
def test_every_state_can_come_about(state: State) -> None:
    assert state in _reachable(State.CREATING)


def test_settled_states_are_those_without_an_operation() -> None:
    assert {state for state in State if state.is_settled} == {State.RUNNING, State.PAUSED, State.ERROR, State.GONE}
    for state in (State.RUNNING, State.PAUSED):
        assert not {Event.DONE, Event.ROLLED_BACK} & TRANSITIONS[state].keys()


@given(st.lists(st.sampled_from(Event), max_size=60))
def test_on_any_walk_a_refusal_changes_nothing_and_a_kill_ends_it(events: list[Event]) -> None:
    state = State.CREATING
    for event in events:
        try:
            state = next_state(state, event)
        except Conflict as refused:
            assert state.value in refused.message  # noqa: PT017  # not every walk is refused
            assert event not in TRANSITIONS[state]
    if state is not State.GONE:
        state = next_state(next_state(state, Event.KILL), Event.DONE)
    assert state is State.GONE


@given(st.sampled_from(State), st.sampled_from(Event))
def test_a_move_is_in_the_table_or_refused(state: State, event: Event) -> None:
    if event in TRANSITIONS[state]:
        assert next_state(state, event) is TRANSITIONS[state][event]
    else:
        with pytest.raises(Conflict, match=f"cannot {event} a sandbox that is {state}"):
            next_state(state, event)
