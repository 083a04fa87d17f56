"""Several processes on one machine, each with its devices of one global mesh, as on several hosts."""

import json
import textwrap

import numpy as np
from processes import run

import tokenloader as tl
from tokenloader.loader.transform_names import transform_names
from tokenloader.plans.cursor import probe


def test_the_batches_of_several_processes_are_those_of_one_device_and_no_row_is_read_for_another():
    printed = run(
        4,
        """
        TOKENS = np.random.default_rng(0).integers(0, 8, 3000).astype(np.uint16)
        B, T = 16, 48

        def check(where, plan, transform):
            recorded = RecordedTokens(TOKENS)
            with (
                tl.TokenLoader(
                    recorded.tokens, B, T, plan=plan, sharding=where, transform=transform
                ) as loader,
                tl.TokenLoader(
                    tl.open_tokens(TOKENS), B, T, plan=plan, sharding=jax.local_devices()[0],
                    transform=transform,
                ) as alone,
            ):
                for batch, one in itertools.islice(zip(loader, alone), 4):
                    assert jax.tree.structure(batch) == jax.tree.structure(one)
                    for a, b in zip(jax.tree.leaves(batch), jax.tree.leaves(one)):
                        assert a.sharding.is_equivalent_to(where, 2)
                        assert (a.shape, a.dtype) == (b.shape, b.dtype)
                        whole = jax.device_get(b)
                        for shard in a.addressable_shards:
                            np.testing.assert_array_equal(
                                jax.device_get(shard.data), whole[shard.index]
                            )
            # Two steps at a time, and of each what the devices here hold: no shard twice.
            held = {str(s.index): s.data.shape for s in batch.inputs.addressable_shards}
            mine = sum(rows * (columns + 1) for rows, columns in held.values())
            asked = recorded.asked("gather")  # and 512 tokens at a time, for the fingerprint
            gathered = {len(starts) * length for starts, length in asked if length <= T + 1}
            assert gathered == {2 * mine}, (gathered, mine)

        by_end, by_begin = tl.segment_documents(eos_id=3), tl.segment_documents(bos_id=3)
        places = [
            ((8, 1), P("data")), ((4, 2), P(("data", "seq"))), ((2, 4), P("data")),  # rows
            ((4, 2), P("data", "seq")), ((2, 2, 2), P("data", "seq")),  # and columns
            ((1, 8), P("data", "seq")), ((2, 4), P(None, "data")),  # columns only
        ]
        types = [AxisType.Auto, AxisType.Explicit]
        for i, (shape, axes) in enumerate(places):
            by_rows, by_columns = types[i % 2], types[1 - i % 2]
            check(NamedSharding(mesh(shape, by_rows), axes), tl.ShuffledEpochs(0), tl.next_token)
            documents = by_begin if by_columns is AxisType.Explicit else by_end
            check(NamedSharding(mesh(shape, by_columns), axes), tl.SequentialWindows(), documents)
        print("the same")
        """,
    )
    assert printed == ["the same\n"] * 4


def test_an_evaluation_on_several_processes_counts_every_target_once():
    printed = run(
        2,
        """
        TOKENS = np.arange(1, 4022, dtype=np.uint16)
        for axes in (P("data"), P("data", "seq"), P(None, "seq")):
            where = NamedSharding(mesh((4, 2)), axes)
            plan, seen, shapes = tl.SequentialWindows(), [], set()
            with tl.TokenLoader(tl.open_tokens(TOKENS), 8, 32, plan=plan, sharding=where) as loader:
                for batch in loader:
                    shapes.add(batch.targets.shape)
                    mask, targets = everywhere(batch.loss_mask), everywhere(batch.targets)
                    seen.extend(targets[mask].tolist())
            assert shapes == {(8, 32)}
            assert seen == TOKENS[1:].tolist()
        print("once")
        """,
    )
    assert printed == ["once\n"] * 2


def test_processes_that_were_given_different_things_all_find_out_at_construction():
    printed = run(
        4,
        """
        TOKENS = np.arange(5000, dtype=np.uint16)
        other = TOKENS.copy()
        other[-1] = 0
        where = NamedSharding(mesh((4, 1)), P("data"))
        def attempt(**different):
            arguments = dict(
                tokens=TOKENS, batch_size=8, seq_len=16, plan=tl.ShuffledEpochs(0), prefetch=2,
                transform=tl.next_token,
            )
            if here == 2:
                arguments |= different
            arguments["tokens"] = tl.open_tokens(arguments["tokens"])
            try:
                tl.TokenLoader(**arguments, sharding=where)
            except ValueError as error:
                print(error)
            else:
                print("the same")

        def compare_names(**arguments):
            try:
                tl.TokenLoader(tl.open_tokens(TOKENS), 8, 16, sharding=where, **arguments)
            except ValueError as error:
                print([line.split(":")[0].strip() for line in str(error).splitlines()[1:]])
            else:
                print("the same")

        attempt()
        attempt(tokens=other)
        attempt(plan=tl.ShuffledEpochs(1), batch_size=16)
        attempt(plan=tl.ShuffledEpochs(0, num_epochs=3))
        attempt(prefetch=3)
        attempt(transform=tl.segment_documents(7))
        attempt(transform=tl.segment_documents(bos_id=7))

        # What neither a repr nor a name tells
        where_are = np.arange(0, 4000, 2)
        moved = where_are.copy()
        moved[700] = 1

        for starts in (where_are.copy(), moved):
            plan = Listed(starts if here == 2 else where_are)
            compare_names(plan=plan)
        factor = 2
        for by in (2, 3):
            closing_over = (lambda c: lambda block: block * c)(by if here == 1 else 2)
            compare_names(transform=closing_over)
            factor = by if here == 1 else 2
            compare_names(transform=lambda block: block * factor)
        """,
        devices=4,
    )
    one, other = np.arange(5000, dtype=np.uint16), np.arange(5000, dtype=np.uint16)
    other[-1] = 0
    begin = "the processes of this run have different arguments for TokenLoader:\n"
    probes = [probe(tl.ShuffledEpochs(seed).bind(5000, 16), 1 << 20) for seed in (0, 1)]
    name = "code and values of the transform"
    transforms = tl.next_token, tl.segment_documents(7), tl.segment_documents(bos_id=7)
    names = [transform_names(each)[name] for each in transforms]
    names[0] = f"{name}: {names[0]}"
    three_epochs = tl.ShuffledEpochs(0, num_epochs=3).bind(5000, 16)
    end = three_epochs.num_samples
    assert (
        printed
        == [
            "the same\n" + begin + f"  tokens: {tl.open_tokens(one).fingerprint()} on processes 0, 1, 3; "
            f"{tl.open_tokens(other).fingerprint()} on process 2\n" + begin + "  batch_size: 8 on "
            "processes 0, 1, 3; 16 on process 2\n"
            "  plan: ShuffledEpochs(seed=0) on processes 0, 1, 3; ShuffledEpochs(seed=1) on process 2\n"
            f"  windows of the plan: {probes[0]} on processes 0, 1, 3; {probes[1]} on process 2\n"
            + begin
            + f"  end of the plan: None on processes 0, 1, 3; {end} on process 2\n"
            f"  windows of the plan: {probes[0]} on processes 0, 1, 3; "
            f"{probe(three_epochs, end)} on process 2\n"
            + begin
            + "  prefetch: 2 on processes 0, 1, 3; 3 on process 2\n"
            + begin
            + f"  {names[0]} on processes 0, 1, 3; {names[1]} on process 2\n"
            + "  transform: next_token on processes 0, 1, 3; SegmentDocuments(eos_id=7) on process 2\n"
            + begin
            + f"  {names[0]} on processes 0, 1, 3; {names[2]} on process 2\n"
            + "  transform: next_token on processes 0, 1, 3; SegmentDocuments(bos_id=7) on process 2\n"
            + "the same\n['plan']\n"
            + "the same\n" * 2
            + "['code and values of the transform']\n" * 2
        ]
        * 4
    )


def test_states_that_differ_are_found_on_every_process_also_where_one_is_no_state():
    printed = run(
        2,
        """
        where = NamedSharding(mesh((2, 1)), P("data"))
        tokens = tl.open_tokens(np.arange(5000, dtype=np.uint16))
        spec = P("data") if hasattr(jax.sharding, "get_mesh") else where  # not in jax 0.8.0
        with jax.set_mesh(where.mesh), tl.TokenLoader(tokens, 4, 16, sharding=spec) as loader:
            assert loader.sharding == where
            next(loader)
            state = loader.get_state()
            if here:
                next(loader)
            mine = loader.get_state()
            for given in (mine, state if here else None):
                try:
                    loader.set_state(given)
                except ValueError as error:
                    print(error)
            try:
                loader.set_state(state, strict=here == 0)
            except ValueError as error:
                print(error)
            try:  # of one process only, it would not even sort
                loader.set_state({1: 2, "a": 3} if here else state)
            except ValueError as error:
                print(error)
            # The same, as another checkpointer gives it
            loader.set_state({**state, "step": np.asarray(state["step"])} if here else state)
            print(everywhere(next(loader).inputs)[:, 0].tolist() == loader.window_starts(1).tolist())
        """,
        devices=2,
    )
    begin = "the processes of this run have different states for set_state:\n"
    bound = tl.ShuffledEpochs(0).bind(5000, 16)
    assert (
        printed
        == [
            begin + f"  probe: {probe(bound, 4)} on process 0; {probe(bound, 8)} on process 1\n"
            "  sample: 4 on process 0; 8 on process 1\n  step: 1 on process 0; 2 on process 1\n"
            + begin
            + "  error: TypeError: state is of type NoneType; expected the dict that get_state() "
            "returned on process 0; none on process 1\n"
            + begin
            + "  strict: True on process 0; False on process 1\n"
            + begin
            + "  error: none on process 0; ValueError: state has version None; this tokenloader reads "
            "version 2: use the release that saved it, or a newer one on process 1\nTrue\n"
        ]
        * 2
    )


def test_what_one_process_refuses_is_an_error_on_every_process_and_leaves_none_waiting():
    printed = run(
        2,
        """
        where = NamedSharding(mesh((2, 1)), P("data"))

        def attempt(num_tokens=500, batch_size=4, seq_len=16, transform=tl.next_token):
            tokens = tl.open_tokens(np.arange(num_tokens, dtype=np.uint16))
            try:
                tl.TokenLoader(
                    tokens, batch_size, seq_len, sharding=where, transform=transform
                ).close()
            except (TypeError, ValueError) as error:
                print(error)
            else:
                print("the same")

        attempt(batch_size=9 if here else 8)
        attempt(num_tokens=500 if here else 10)
        attempt(transform=tl.next_token if here else 7)
        attempt(batch_size=9)
        attempt(transform=functools.partial(lambda block, by: block + by, by=3))
        """,
        devices=2,
    )
    begin = "the processes of this run have different arguments for TokenLoader:\n"
    divide = "batch_size=9 does not divide over the 2 shards of mesh axis 'data'; the nearest that does: "
    assert (
        printed
        == [
            begin
            + f"  error: none on process 0; ValueError: {divide}8 and 10 on process 1\n"
            + begin
            + "  error: ValueError: 10 tokens are fewer than one window of seq_len + 1 = 17; use a "
            "seq_len of at most 9, or more data on process 0; none on process 1\n"
            + begin
            + "  error: TypeError: transform is of type int; expected a callable, or None on process 0; "
            "none on process 1\n" + divide + "8 and 10\nthe same\n"
        ]
        * 2
    )


def test_an_error_of_one_process_does_not_set_it_apart_from_the_others():
    # Documents are counted across both: what one launches must go with what the other does.
    printed = run(
        2,
        """
        TOKENS = np.random.default_rng(0).integers(0, 8, 3000).astype(np.uint16)
        calls = itertools.count()

        def away():
            if here and next(calls) == 1:
                raise OSError("the disk was away")

        where = NamedSharding(mesh((1, 2)), P("data", "seq"))
        documents = tl.segment_documents(3)
        errors = 0
        with (
            tl.TokenLoader(
                watched_tokens(away, TOKENS), 4, 48, sharding=where, transform=documents
            ) as loader,
            tl.TokenLoader(
                tl.open_tokens(TOKENS), 4, 48, sharding=jax.local_devices()[0], transform=documents
            ) as alone,
        ):
            for one in itertools.islice(alone, 8):
                try:
                    batch = next(loader)
                except OSError:
                    errors += 1
                    batch = next(loader)
                for a, b in zip(batch, one):
                    whole = jax.device_get(b)
                    for shard in a.addressable_shards:
                        np.testing.assert_array_equal(jax.device_get(shard.data), whole[shard.index])
        print(errors)
        """,
        devices=2,
    )
    assert printed == ["0\n", "1\n"]


def test_a_mesh_that_leaves_this_process_out_is_an_error_at_construction():
    printed = run(
        2,
        """
        tokens = tl.open_tokens(np.arange(500, dtype=np.uint16))
        other = jax.sharding.Mesh(np.array(jax.devices()[1 - here :][:1]), ("data",))
        try:
            tl.TokenLoader(tokens, 4, 16, sharding=NamedSharding(other, P("data")))
        except ValueError as error:
            print(str(error).split("PartitionSpec")[-1].split(" has ", 1)[1])
        mine = jax.sharding.Mesh(np.array(jax.local_devices()), ("data",))
        with tl.TokenLoader(tokens, 4, 16, sharding=NamedSharding(mine, P("data"))) as loader:
            print(next(loader).inputs.shape)
        """,
        devices=2,
    )
    outside = (
        "no device of this process, {} of 2, but of process {}; make the loader in those processes only, "
        "or its mesh of all jax.devices()\n(4, 16)\n"
    )
    assert printed == [outside.format(0, 1), outside.format(1, 0)]


def test_that_processes_read_the_same_blocks_is_told_once_by_the_first_of_them():
    printed = run(
        3,
        """
        import tempfile, warnings
        with tempfile.NamedTemporaryFile(suffix=".npy") as file:
            np.save(file, np.arange(20_000, dtype=np.uint16))
            file.flush()
            tokens = tl.open_tokens(file.name)
        blocks, halves = tl.ShuffledBlocks(0, block_tokens=200, open_blocks=24), range(10_000)
        whole = NamedSharding(mesh((3, 1)), P("data"))
        some = NamedSharding(jax.sharding.Mesh(np.array(jax.devices()[1:]), ("data",)), P("data"))

        def told(batch_size, plan=blocks, where=whole, **more):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                with tl.TokenLoader(tokens, batch_size, 12, plan=plan, sharding=where, **more) as loader:
                    next(loader)
                    loader.set_state(loader.get_state())
                    next(loader)
            line = told.__code__.co_firstlineno + 3
            print([(str(each.message).split(",")[0], each.lineno - line) for each in caught])

        told(12)
        told(9)
        told(9, plan=tl.Mixture({halves: 1}, blocks))
        told(9, plan=tl.ShuffledEpochs(0))
        told(9, where=NamedSharding(whole.mesh, P()))
        told(9, where=NamedSharding(whole.mesh, P(None, "data")), transform=None)
        if here:
            told(10, where=some)
        """,
        devices=3,
    )
    # The block of a sample is told by its row modulo the common divisor of rows and open blocks: of 9 and
    # 24 that is 3, of 10 and 24 it is 2, and each process has rows of every remainder.
    told = "[('the {} processes of this sharding will read {} times as much as they need', 0)]\n"
    of_three, of_two = told.format(3, "3.0"), told.format(2, "2.0")
    assert printed == [
        "[]\n" + of_three * 2 + "[]\n" * 3,
        "[]\n" * 6 + of_two,
        "[]\n" * 7,
    ]


ELASTIC = """
    # Every token is its own position, so that a batch's first column is its starts.
    import tempfile
    parts = np.array_split(np.arange(40_000, dtype=np.uint32), FILES)
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for i, part in enumerate(parts):
            np.save(f"{folder}/{i}.npy", part)
            paths.append(f"{folder}/{i}.npy")
        shape = (jax.device_count(), 1)
        with tl.open_tokens(paths, residency=RESIDENCY) as tokens, tl.TokenLoader(
            tokens, BATCH, 128, plan=tl.ShuffledEpochs(3), prefetch=PREFETCH,
            sharding=NamedSharding(mesh(shape), P("data")),
        ) as loader:
            if STATE is not None:
                loader.set_state(STATE)
            seen, states = [], []
            for batch in itertools.islice(loader, STEPS):
                seen += everywhere(batch.inputs)[:, 0].tolist()
                states.append(loader.get_state())
    if here == 0:
        print(json.dumps([seen, states]))
"""


def leg(count, state, *, batch, steps, files=1, residency="mmap", prefetch=2):
    values = {
        "FILES": files, "RESIDENCY": repr(residency), "BATCH": batch, "PREFETCH": prefetch,
        "STATE": repr(state), "STEPS": steps,
    }  # fmt: skip
    script = textwrap.dedent(ELASTIC)
    for name, value in values.items():
        script = script.replace(name, str(value))
    return json.loads(run(count, script)[0])


def test_a_run_goes_on_in_order_with_other_processes_batches_files_and_residency():
    # An epoch has 311 windows; two processes stop a little before its end, or after it.
    whole = tl.ShuffledEpochs(3).bind(40_000, 128).window_starts(range(1000)).tolist()
    before, states = leg(2, None, batch=64, steps=5, files=3)
    assert before == whole[: 5 * 64]
    for count, state, how in [
        (1, 3, {"batch": 32, "steps": 4, "files": 1, "residency": "ram"}),
        (4, 3, {"batch": 128, "steps": 2, "files": 7, "prefetch": 5}),
        (1, 4, {"batch": 32, "steps": 3, "files": 2, "prefetch": 1}),
    ]:
        first = 64 * (state + 1)
        after, _ = leg(count, states[state], **how)
        assert after == whole[first : first + how["batch"] * how["steps"]], (count, state)


ORBAX = """
    import orbax.checkpoint as ocp
    FOLDER = {folder!r}
    tokens = tl.open_tokens(np.arange(40_000, dtype=np.uint32))
    where = NamedSharding(mesh((jax.device_count(), 1)), P("data"))
    with jax.transfer_guard("allow"):
        params = {{"w": jax.device_put(np.zeros((8, 4), np.float32), where)}}
        with (
            tl.TokenLoader(tokens, 16, 128, sharding=where) as loader,
            ocp.CheckpointManager(FOLDER) as manager,
        ):
            if {save}:
                for _ in range(5):
                    next(loader)
                manager.save(5, args=ocp.args.Composite(
                    params=ocp.args.StandardSave(jax.tree.map(lambda x: x + 5, params)),
                    loader=ocp.args.JsonSave(loader.get_state()),
                ))
            else:
                saved = manager.restore(5, args=ocp.args.Composite(
                    params=ocp.args.StandardRestore(params), loader=ocp.args.JsonRestore(),
                ))
                loader.set_state(saved.loader)
                assert everywhere(saved.params["w"]).tolist() == [[5.0] * 4] * 8
                print(everywhere(next(loader).inputs)[:, 0].tolist())
"""


def test_a_state_in_an_orbax_checkpoint_beside_params_is_restored_by_other_processes(tmp_path):
    folder = str(tmp_path / "checkpoints")
    run(2, ORBAX.format(folder=folder, save=True))
    printed = run(4, ORBAX.format(folder=folder, save=False))
    starts = tl.ShuffledEpochs(0).bind(40_000, 128).window_starts(range(80, 96))
    assert printed == [f"{starts.tolist()}\n"] * 4
