"""What ranks are told, and what they tell: their rendezvous, logs, results and reports."""

from contextlib import aclosing

from basilica.core.mesh import Announcement, Gate
from basilica.core.reports import SeriesQuery
from basilica.testing.runtime_contract.world import FOR_EVER, Opens, World, reporting, story


class Telling(Opens):
    """What passes between ranks and those who asked for them."""

    @story
    async def test_a_rendezvous_says_what_is_announced_and_nothing_else(self, world: World) -> None:
        world.lets_hosts_go = False
        run = world.run(FOR_EVER)
        for wanted in (
            Announcement(2, (("a", Gate.READY),)),
            Announcement(3, (("a", Gate.DEGRADED), ("b", Gate.READY))),
            Announcement(1),
        ):
            await world.announced(run, wanted)
        await world.do(lambda: world.runtime.end_rendezvous(run))
        await world.do(lambda: world.runtime.end_rendezvous(run))
        await world.without_rendezvous(run)

    @story
    async def test_the_log_is_read_from_its_end_and_from_its_beginning(self, world: World) -> None:
        run = world.run("for n in 1 2 3 4 5; do echo line $n; done")
        await world.launch(run, 0)
        await world.ended(run)
        await world.written_to_log(run, "line 5")
        assert (await world.runtime.tail(run, 0, 2)).lines == ("line 4", "line 5")
        everything = (await world.runtime.tail(run, 0, None)).lines
        assert everything[-5:] == ("line 1", "line 2", "line 3", "line 4", "line 5")
        for count in (0, 2, 5):
            lines: list[str] = []
            cursor = await world.runtime.tail_cursor(run, 0, count)
            async with aclosing(world.runtime.read(run, 0, cursor)) as chunks:
                async for chunk in chunks:
                    lines += chunk.lines
                    cursor = chunk.cursor
            async with aclosing(world.runtime.read(run, 0, cursor)) as chunks:
                assert [chunk async for chunk in chunks] == []
            assert tuple(lines) == everything[len(everything) - count :]

    @story
    async def test_a_log_is_followed_and_gone_on_with(self, world: World) -> None:
        run = world.run(f"echo one; while [ ! -e {world.files}/go ]; do sleep 0.02; done; echo two; {FOR_EVER}")
        await world.launch(run, 0)
        await world.running(run)
        cursor: str | None = None
        lines: list[str] = []
        async with aclosing(world.runtime.follow(run, 0, None)) as following:
            async for chunk in following:
                lines += chunk.lines
                cursor = chunk.cursor
                if "one" in lines and not chunk.lines:
                    break
        assert lines[-1] == "one"
        (world.files / "go").touch()
        async with aclosing(world.runtime.follow(run, 0, cursor)) as following:
            async for chunk in following:
                if chunk.lines:
                    assert chunk.lines == ("two",)
                    break

    @story
    async def test_results_are_given_by_rank(self, world: World) -> None:
        run = world.run('[ $RANK = 0 ] && printf "zero" >"$BASILICA_RESULT_FILE"; true')
        await world.launch(run, 0, 1)
        await world.ended(run, 0)
        await world.ended(run, 1)
        assert await world.do(lambda: world.runtime.results(run)) == {0: b"zero"}
        await world.do(lambda: world.runtime.end_rendezvous(run))
        assert await world.do(lambda: world.runtime.results(run)) == {0: b"zero"}

    @story
    async def test_what_ranks_report_is_known_while_they_run_and_after_their_end(self, world: World) -> None:
        wait = f"import os, time\nwhile not os.path.exists({str(world.files / 'go')!r}): time.sleep(0.02)"
        run = world.run(reporting(f"for n in range(5): report(step=n, loss=5.0 - n)\n{wait}\nreport(step=9, loss=0.5)"))
        await world.launch(run, 0)
        await world.running(run)
        await world.reported(run, step=4)
        [before] = await world.series(run, points=5)
        assert [(point.step, point.mean) for point in before.points] == [(n, 5.0 - n) for n in range(5)]
        (world.files / "go").touch()
        await world.ended(run)
        for _ in range(2):
            [series] = await world.series(run, points=6)
            assert (series.rank, series.worker, series.metric) == (0, 0, "loss")
            assert [point.step for point in series.points] == [0, 1, 2, 3, 4, 9]
            report = (await world.do(lambda: world.runtime.reports(run)))[0]
            assert (report.step, report.values) == (9, {"loss": 0.5})
            await world.do(lambda: world.runtime.end_rendezvous(run))
            await world.without_rendezvous(run)

    @story
    async def test_a_series_goes_on_over_attempts_and_is_shown_as_it_is_asked_for(self, world: World) -> None:
        who = "a, r = int(os.environ['BASILICA_ATTEMPT']), int(os.environ['RANK'])"
        tell = "for n in range(10): report(step=10 * a + n, loss=n, lr=r)"
        run = world.run(reporting(f"import os\n{who}\n{tell}\nexit(3 if a == 0 else 0)"))
        await world.launch(run, 0, 1)
        await world.ended(run, 0)
        await world.ended(run, 1)
        await world.launch(run, 0, attempt=1)
        await world.ended(run, 0, 1)
        await world.do(lambda: world.runtime.end_rendezvous(run))
        found = await world.series(run)
        assert [(each.rank, each.metric) for each in found] == [(0, "loss"), (0, "lr"), (1, "loss"), (1, "lr")]
        assert [point.step for point in found[0].points] == list(range(20))
        assert [point.step for point in found[2].points] == list(range(10))
        [few] = await world.series(run, SeriesQuery(ranks=frozenset({0}), metrics=frozenset({"loss"}), points=4))
        assert [(p.step, p.mean, p.min, p.max, p.count) for p in few.points] == [
            (4, 2.0, 0.0, 4.0, 5),
            (9, 7.0, 5.0, 9.0, 5),
            (14, 2.0, 0.0, 4.0, 5),
            (19, 7.0, 5.0, 9.0, 5),
        ]
        moment = found[0].points[10].at
        late = await world.series(run, SeriesQuery(since=moment))
        assert [[p.step for p in each.points] for each in late] == [list(range(10, 20))] * 2
