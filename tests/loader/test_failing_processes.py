"""What goes wrong in one process is an error on all, within seconds, that names process and cause."""

import re
import textwrap

import pytest
from processes import run

# A process that ends by an error would otherwise wait for minutes in jax's shutdown for those that do not
# hear of it, and `run` would not return.
SCRIPT = """
    import warnings
    import tokenloader.loader.meetings
    warnings.simplefilter("ignore")
    TOKENS = np.arange(30_000, dtype=np.uint16)
    everyone = NamedSharding(mesh((jax.device_count(), 1)), P("data"))

    def make(sharding=everyone, tokens=TOKENS, **more):
        tokens = tl.open_tokens(tokens) if isinstance(tokens, np.ndarray) else tokens
        return tl.TokenLoader(tokens, 8 * count, 16, sharding=sharding, **more)

    def attempt(call):
        began = time.monotonic()
        try:
            call()
        except Exception as error:
            seconds = time.monotonic() - began
            print("late" if seconds > 20 else "soon", type(error).__name__, error)
        else:
            print("nothing")

    def wait_for_all(name="end"):  # a process that failed could do anything else, and need not end
        jax._src.distributed.global_state.client.wait_at_barrier(name, 60_000)

    def take(loader, seconds=20):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            next(loader)
            time.sleep(0.05)
"""


def outcomes(count, script, *, before=""):
    script = textwrap.dedent(before) + textwrap.dedent(SCRIPT) + textwrap.dedent(script)
    return run(count, script, devices=count, must_succeed=False)


def assert_all_say(printed, pattern, *, but=()):
    for process, text in enumerate(printed):
        if process not in but:
            assert re.search(pattern, text), (process, text)


def test_an_error_in_next_of_one_process_is_an_error_in_next_of_all():
    printed = outcomes(
        8,
        """
        calls = itertools.count()

        def fail():
            if here == 1 and next(calls) >= 5:
                raise OSError(5, "the disk was away", "a.bin")

        loader = make(tokens=watched_tokens(fail, TOKENS), transform=None)
        attempt(lambda: take(loader))
        wait_for_all()
        """,
    )
    error = r"OSError: \[Errno 5\] the disk was away: 'a.bin'"
    assert_all_say(
        printed,
        rf"^soon OtherProcessError process 1 of 8 failed in next\(\) at step 5: {error}",
        but=[1],
    )
    assert printed[1].startswith("soon OSError [Errno 5] the disk was away")


def test_after_an_error_of_one_process_all_go_on_with_the_batches_of_their_steps():
    printed = outcomes(
        2,
        """
        failing = here == 1

        def fail():
            if failing:
                raise OSError("the disk was away")

        with make(tokens=watched_tokens(fail, TOKENS), transform=None) as loader:
            attempt(lambda: take(loader))
            time.sleep(4)
            failing = False
            batch = next(loader)
            windows = loader.window_tokens(loader.step - 1)
            for shard in batch.addressable_shards:
                np.testing.assert_array_equal(jax.device_get(shard.data), windows[shard.index])
            print("the same")
        """,
    )
    assert_all_say(printed, "\nthe same\n$")
    assert printed[0].startswith(
        "soon OtherProcessError process 1 of 2 failed in next() at step 0: OSError: the"
    )
    assert printed[1].startswith("soon OSError the disk was away")


@pytest.mark.parametrize("knows_devices", [True, False])
def test_a_file_that_one_process_lacks_is_an_error_on_all(knows_devices):
    opening = "if here == 2: tl.open_tokens('/absent/a.bin')\n"
    printed = outcomes(
        3,
        opening * knows_devices + "attempt(make)",
        before=opening * (not knows_devices),
    )
    ended = r"process 2 of 3 ended by FileNotFoundError: /absent/a\.bin"
    assert_all_say(printed, f"^soon OtherProcessError .*{ended}", but=[2])


def test_a_process_that_ends_before_it_makes_a_loader_is_named():
    printed = outcomes(2, "attempt(make) if here else sys.exit(0)")
    assert printed[1].startswith("soon OtherProcessError process 0 of 2 ended, before its TokenLoader()")


def test_a_process_that_goes_on_without_set_state_is_an_error_on_all():
    printed = outcomes(
        3,
        """
        loader = make()
        state = loader.get_state()
        attempt(lambda: next(loader) if here == 1 else loader.set_state(state))
        attempt(lambda: loader.set_state(state))
        attempt(lambda: next(loader))
        """,
    )
    assert_all_say(
        printed,
        r"^soon ValueError .*in different calls.*: set_state\(\) on process[^;]*; next\(\) on process 1\n"
        r"Every process .* checkpoint.*\nnothing\nnothing\n$",
    )


def test_every_pass_begins_with_a_meeting_and_positions_that_differ_are_an_error_on_all():
    printed = outcomes(
        2,
        """
        with make(plan=tl.SequentialWindows(), tokens=np.arange(1000, dtype=np.uint16)) as loader:
            print(len(list(loader)))
            if here == 0:
                print(len(list(loader)))
            else:
                print(sum(1 for _ in iter(loader)))
            next(iter(loader))
            state = loader.get_state()
            loader.set_state(state)
            loader._cursor = loader._cursor.advance() if here else loader._cursor
            attempt(lambda: next(loader))
        """,
    )
    difference = (
        "soon ValueError the processes of this run have different positions in next():\n"
        "  sample: 16 on process 0; 32 on process 1\n  step: 1 on process 0; 2 on process 1\n"
    )
    assert printed == ["4\n4\n" + difference] * 2


def test_a_loader_of_one_process_alone_where_the_others_make_one_together_is_an_error_on_all():
    printed = outcomes(
        3,
        """
        tokenloader.loader.meetings.PATIENCE_SECONDS = 3
        wait_for_all("begin")
        if here == 1:
            loader = make(None)
            attempt(lambda: take(loader))
        else:
            attempt(make)
        """,
    )
    made = r"made a TokenLoader of the same tokens, .* with sharding=SingleDevice"
    assert_all_say(
        printed, rf"^soon OtherProcessError .*process 1 of 3 .*{made}.*; expected the same sharding"
    )
    assert "waited in TokenLoader() in vain: process 1 of" in printed[1]


def test_a_process_that_is_slow_after_a_loader_of_its_own_or_a_missing_file_is_waited_for():
    printed = outcomes(
        2,
        """
        tokenloader.loader.meetings.PATIENCE_SECONDS = 2
        if here == 1:
            preview = make(None)
            next(preview)
            attempt(lambda: tl.open_tokens("/absent/a.bin"))
            time.sleep(5)  # it copies the file, perhaps
        attempt(lambda: next(make()))
        if here == 1:
            next(preview)
        """,
    )
    assert printed[0] == "nothing\n"
    assert printed[1].startswith("soon FileNotFoundError")
    assert printed[1].endswith("\nnothing\n")


def test_a_sharding_that_one_process_cannot_resolve_is_an_error_on_all():
    printed = outcomes(
        3,
        """
        tokenloader.loader.meetings.PATIENCE_SECONDS = 3
        wait_for_all("begin")
        attempt(lambda: make(7 if here == 2 else everyone))
        wait_for_all()
        """,
    )
    assert_all_say(
        printed, r"^soon OtherProcessError on process 2 of 3, TokenLoader\(\) raised TypeError", but=[2]
    )
    assert printed[2].startswith("soon TypeError sharding is of type int")


def test_a_mesh_that_leaves_out_processes_that_wait_for_this_one_is_an_error_on_all():
    printed = outcomes(
        3,
        """
        tokenloader.loader.meetings.PATIENCE_SECONDS = 3
        wait_for_all("begin")
        two = jax.sharding.Mesh(np.array(jax.devices()[1:]), ("data",))
        attempt(lambda: make(NamedSharding(two, P("data")) if here == 1 else everyone))
        """,
    )
    assert_all_say(
        printed,
        # Process 1 may look when process 0 has been told already.
        r"^soon ValueError .*: TokenLoader\(\) of processes 0, 1, 2 on process(es 0,)? 2; "
        r"TokenLoader\(\) of processes 1, 2 on process 1\n",
    )


def test_some_of_the_processes_make_a_loader_of_their_own_and_agree():
    printed = outcomes(
        4,
        """
        if here in (1, 3):
            two = jax.sharding.Mesh(np.array([jax.devices()[1], jax.devices()[3]]), ("data",))

            def make_for_two(batch_size):
                sharding = NamedSharding(two, P("data"))
                return tl.TokenLoader(tl.open_tokens(TOKENS), batch_size, 16, sharding=sharding)

            attempt(lambda: make_for_two(8 if here == 1 else 10))
            with make_for_two(8) as loader:
                loader.set_state(loader.get_state())
                for step in range(5):
                    batch, windows = next(loader), loader.window_tokens(step)
                    for shard in batch.targets.addressable_shards:
                        np.testing.assert_array_equal(
                            jax.device_get(shard.data), windows[:, 1:][shard.index]
                        )
                print("the same")
        """,
    )
    difference = "different arguments for TokenLoader:\n  batch_size: 8 on process 1; 10 on process 3\n"
    for process in (1, 3):
        assert printed[process] == f"soon ValueError the processes of this run have {difference}the same\n"
    assert printed[0] == printed[2] == ""


@pytest.mark.parametrize("way", ["None", "jax.local_devices()[0]"])
def test_a_loader_of_one_process_alone_in_a_program_of_several_warns_once(way):
    printed = outcomes(
        2,
        f"""
        warnings.simplefilter("always")
        with warnings.catch_warnings(record=True) as caught:
            make({way}), make({way})
        print(*[f"{{each.category.__name__}} {{each.filename}} {{each.message}}" for each in caught])
        """,
    )
    for here, text in enumerate(printed):
        assert text.startswith(
            f"UserWarning <string> this TokenLoader is on devices of process {here} of 2 alone"
        )
        assert text.count("UserWarning") == 1
        assert "pass a sharding over the devices of all: NamedSharding(jax.make_mesh(" in text
        assert "tokens.view()" in text
