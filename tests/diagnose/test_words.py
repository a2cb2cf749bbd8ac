"""What findings say: an exception on one line and once, and a forgotten group= before those who were missed."""

from __future__ import annotations

from tests.diagnose.made import Made, group
from workbench.diagnose import diagnose
from workbench.diagnose.words import error_words

WORLD, FIRST = group("world", 0, 1, 2, 3), group("tp", 0, 1, ordinal=1)
LOST = (
    "RuntimeError: [gloo/pair.cc:547] Connection closed by peer [127.0.0.1]:{}\n"
    "Exception raised from f at x.cpp:1 (most recent call first):\nframe #0: a"
)


def exchange(made: Made) -> None:
    for r in range(4):
        made.call(r, "init_process_group", WORLD)
        made.call(r, "barrier", WORLD, note="default group")
        made.call(r, "new_group", FIRST)
    for r in (0, 1):
        made.begin(r, "all_gather_object", WORLD, note="default group")


def test_a_forgotten_group_is_told_first_where_exactly_its_members_call_and_the_others_have_gone_on() -> None:
    made = Made(4)
    exchange(made)
    made.exit(2, 3)
    first = diagnose(made.trace(), now_ns=made.now_ns)[0]
    assert (first.kind, first.ranks) == ("rendezvous-partial", (2, 3))
    assert first.message.startswith(
        "called without group=, so over all ranks, by exactly the members of tp[0,1]: all_gather_object in main"
    )
    assert first.fix == "pass tp[0,1] to this call as group="


def test_where_the_others_may_yet_come_no_group_is_said_to_be_forgotten() -> None:
    made = Made(4)
    exchange(made)
    made.pause(10)
    first = diagnose(made.trace(), now_ns=made.now_ns, deadline_s=5)[0]
    assert (first.ranks, first.certainty) == ((2, 3), "likely")
    assert first.message.startswith("all_gather_object in main")
    assert "It was called without group=, so over all ranks." in first.message


def test_a_long_text_of_an_exception_is_one_line_and_told_once() -> None:
    made = Made(4)
    begun = {r: made.begin(r, "all_reduce", WORLD) for r in (0, 1, 2)}
    made.exit(3)
    for r, event in begun.items():
        made.end(event, LOST.format(4000 + r))
    first = diagnose(made.trace())[0]
    assert first.message.count("Connection closed by peer") == 1
    assert "most recent call first" not in first.message
    assert [line.partition(": ")[2] for line in first.evidence] == [
        "raised RuntimeError: [gloo/pair.cc:547] Connection closed by peer [127.0.0.1]:4000",
        "raised the same",
        "raised the same",
    ]
    assert "\n" not in "".join(first.evidence)


def test_a_text_without_end_is_cut() -> None:
    assert error_words("ValueError: " + "x" * 1000) == "ValueError: " + "x" * 385 + "..."


def test_those_who_came_and_wait_are_named_once_and_the_ended_do_not_still_wait() -> None:
    made = Made(4)
    for r in (0, 1):
        made.begin(r, "barrier", WORLD)
    made.exit(2, 3)
    made.pause(6)
    first = diagnose(made.trace(), now_ns=made.now_ns, deadline_s=5)[0]
    assert ": world ranks 0,1 came and still wait after 6.0 s, world ranks 2,3 never did." in first.message
    made.exit(1, status=1)
    made.exit(0, status=-15)
    over = next(f for f in diagnose(made.trace()) if f.ranks == (2, 3))
    assert ": world ranks 0,1 came and waited until their end, world ranks 2,3 never did." in over.message
    assert "still wait" not in over.message


def test_of_some_who_wait_others_only_came() -> None:
    made = Made(3)
    trio = group("world", 0, 1, 2)
    made.begin(0, "barrier", trio)
    made.call(1, "barrier", trio, error="RuntimeError: lost")
    made.exit(1, status=1)
    made.exit(2)
    made.pause(6)
    first = next(f for f in diagnose(made.trace(), now_ns=made.now_ns, deadline_s=5) if f.ranks == (2,))
    assert ": world ranks 0,1 came, world rank 0 still waits after 6.0 s, world rank 2 never did." in first.message


def test_an_exception_without_a_text_is_named_and_the_sentence_ends() -> None:
    made = Made(2)
    pair = group("world", 0, 1)
    begun = made.begin(0, "barrier", pair)
    made.exit(1)
    made.end(begun, "KeyboardInterrupt: ")
    first = diagnose(made.trace())[0]
    assert first.message.endswith(" World rank 0 raised KeyboardInterrupt.")
    assert " World rank 0 raised KeyboardInterrupt. Try: " in str(first)


def test_of_two_sides_it_is_told_who_raised_what() -> None:
    made = Made(4)
    for r, error in enumerate(("ValueError: a", "", "ValueError: a", "KeyError: b")):
        made.call(r, "all_reduce", WORLD, shape=(4 if r else 6,), error=error)
    first = diagnose(made.trace())[0]
    assert first.message.endswith(
        " on world rank 0. World ranks 0,2 raised ValueError: a; world rank 3 raised KeyError: b."
    )
