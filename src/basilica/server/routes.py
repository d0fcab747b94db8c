"""The REST routes: each parses, calls the control plane and renders. The control plane decides.

Bodies are parsed from bytes and answers are written as bytes, so that each is converted once; the models are declared
for the OpenAPI document.
"""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from starlette.responses import Response

from basilica.controller.plane import ControlPlane
from basilica.controller.step import run_of
from basilica.core.deployment import Deployment
from basilica.core.errors import AuthorizationError, Conflict, DeploymentDamaged, DeploymentNotFound, ValidationError
from basilica.core.reports import POINTS_DEFAULT, POINTS_MAX, SeriesQuery
from basilica.core.spec import check_command
from basilica.core.why import why, with_troubles
from basilica.server.logs import NDJSON, LogQuery, answer_logs, parse_cursors
from basilica.server.metrics import Metrics
from basilica.server.outputs import final_line, render_results, rendering, stream_output
from basilica.server.reports import Fresh, last_reports, newest
from basilica.server.streams import LastingResponse, next_change, wait_until_removed, watch
from basilica.version import __version__
from basilica.wire import requests as inc
from basilica.wire import responses as out
from basilica.wire.base import Outgoing, rfc3339, rfc3339_or_none
from basilica.wire.render import (
    render_checkpoint,
    render_damaged_deployment,
    render_deployment,
    render_event,
    render_listed,
    render_rank,
    render_series,
    shown_ranks,
)

JSON = "application/json"
NO_SHARING = "this server publishes nothing: deployments have no public address or metadata"
ACCESS_ENDED = "the key or the session of this request has ended"

Version = Annotated[int, Query(ge=0, le=2**63 - 1)]
WaitSeconds = Annotated[float, Query(ge=0, le=600, allow_inf_nan=False)]


def json_answer(model: Outgoing, status: int = 200) -> Response:
    return Response(model.to_json(), status, media_type=JSON)


def build_router(plane: ControlPlane, metrics: Metrics, closing: asyncio.Event) -> APIRouter:
    router = APIRouter()

    def rendered(deployment: Deployment) -> bytes:
        return render_deployment(plane.shown(deployment), plane.now(), unattended=plane.unattended()).to_json()

    def answered(deployment: Deployment, status: int = 200) -> Response:
        return Response(rendered(deployment), status, media_type=JSON)

    async def reported(deployment: Deployment) -> tuple[bytes, float]:
        """Return the run with the last reports of its ranks, and the time of the newest."""
        reports = await last_reports(plane.runtime, deployment)
        answer = render_deployment(plane.shown(deployment), plane.now(), reports, plane.unattended())
        return answer.to_json(), newest(reports)

    # ---- runs ----------------------------------------------------------------------------------------------------

    @router.post("/deployments", status_code=201, response_model=out.DeploymentResponse)
    async def create_deployment(
        request: Request, idempotency_key: Annotated[str | None, Header(min_length=1, max_length=200)] = None
    ) -> Response:
        """Start a run. With an Idempotency-Key, asking again gives the same run."""
        spec = inc.to_spec(inc.parse(inc.CreateDeployment, await request.body()))
        return answered(await plane.create(_user(request), spec, idempotency_key), 201)

    @router.get("/deployments", response_model=out.DeploymentList)
    async def list_deployments(request: Request) -> Response:
        """All runs of the user, newest first."""
        found = await plane.listed(_user(request))
        rows = [render_listed(plane.shown(run)) for run in found]
        return json_answer(out.DeploymentList(deployments=rows, total=len(found)))

    @router.get("/deployments/{name}", response_model=out.DeploymentResponse)
    async def get_deployment(request: Request, name: str) -> Response:
        """A run by its instance name, or the newest with that friendly name."""
        try:
            body, _ = await reported(await plane.get(_user(request), name))
        except DeploymentDamaged as error:
            return json_answer(render_damaged_deployment(error.run))
        return Response(body, media_type=JSON)

    @router.delete("/deployments/{name}", response_model=out.Deleted)
    async def delete_deployment(request: Request, name: str, wait: WaitSeconds = 2.0) -> Response:
        """End the run and remove its record. State `Terminating`: ranks are still using their grace period."""
        deployment = await plane.delete(_user(request), name)
        gone = await wait_until_removed(plane.store, deployment, wait, closing)
        message = "deleted" if gone else "ranks are being stopped, then the record is removed"
        state = "Deleted" if gone else "Terminating"
        return json_answer(out.Deleted(instance_name=deployment.instance, state=state, message=message))

    @router.post("/deployments/{name}/scale-distributed", response_model=out.DeploymentResponse)
    async def scale_deployment(request: Request, name: str) -> Response:
        """Change how many ranks are wanted, within the run's min and max."""
        body = inc.parse(inc.ScaleBody, await request.body())
        return answered(await plane.scale(_user(request), name, body.target))

    @router.post("/deployments/{name}/cancel", response_model=out.DeploymentResponse)
    async def cancel_deployment(request: Request, name: str) -> Response:
        """End the run and keep its record. Cancelling an ended run changes nothing."""
        return answered(await plane.cancel(_user(request), name))

    @router.post("/deployments/{name}/restart", response_model=out.DeploymentResponse)
    async def restart_deployment(request: Request, name: str) -> Response:
        """Give all ranks of a live run a fresh start."""
        return answered(await plane.restart(_user(request), name))

    @router.post("/deployments/{name}/rerun", status_code=201, response_model=out.DeploymentResponse)
    async def rerun_deployment(
        request: Request,
        name: str,
        *,
        resume: bool = False,
        idempotency_key: Annotated[str | None, Header(min_length=1, max_length=200)] = None,
    ) -> Response:
        """Start a new run like this one, with the same secrets and files. `resume`: it goes on from this one's
        progress, and this one must have ended."""
        return answered(await plane.rerun(_user(request), name, idempotency_key, resume=resume), 201)

    @router.put("/archives", response_model=out.ArchiveStored, openapi_extra=_ARCHIVE_BODY)
    async def store_archive(request: Request) -> Response:
        """Keep a directory, as a tar.gz, for runs that name it as `workdirArchive`."""
        kept = await plane.runtime.store_archive(_user(request), request.stream())
        return json_answer(out.ArchiveStored(archive=kept.digest, bytes=kept.bytes))

    @router.post("/prune", response_model=out.Pruned)
    async def prune(
        request: Request, older_than: Annotated[float, Query(ge=0, le=1e10, allow_inf_nan=False)] = 0.0
    ) -> Response:
        """Delete the user's runs that ended more than `older_than` seconds ago, with their logs."""
        return json_answer(out.Pruned(deleted=await plane.prune(_user(request), older_than)))

    # ---- reading -------------------------------------------------------------------------------------------------

    @router.get("/deployments/{name}/watch", response_model=out.DeploymentResponse, responses=_WATCH_RESPONSES)
    async def watch_deployment(
        request: Request,
        name: str,
        *,
        since: Version = 0,
        wait: Annotated[float | None, Query(ge=0, le=600, allow_inf_nan=False)] = None,
        reported_since: Annotated[float | None, Query(ge=0, le=1e10, allow_inf_nan=False)] = None,
        last_event_id: Annotated[int | None, Header(ge=0, le=2**63 - 1)] = None,
    ) -> Response:
        """The run's changes as server-sent events, from after version `since` (or Last-Event-ID).

        With `wait`, a long poll: the run as soon as it is newer than `since`, or as it is when the time is up.
        With `reported_since`, in seconds since 1970, also when a rank has reported after that moment, but at most about
        once a second.
        """
        deployment = await plane.get(_user(request), name)
        since = since if last_event_id is None else last_event_id
        fresh = None if reported_since is None else Fresh(plane.runtime, reported_since)
        if wait is None:
            events = watch(plane.store, deployment, since, reported, closing, fresh=fresh)
            return LastingResponse(events, media_type="text/event-stream")
        also = None if fresh is None else fresh.wait(deployment)
        changed = await next_change(
            plane.store, deployment.instance, since, closing, seconds=wait, reader=request, also=also
        )
        body, _ = await reported(changed or await plane.get(_user(request), deployment.instance))
        return Response(body, media_type=JSON)

    @router.get("/deployments/{name}/why", response_model=out.Why)
    async def why_deployment(request: Request, name: str) -> Response:
        """What the run is waiting for, in one sentence."""
        d = await plane.get(_user(request), name)
        answer = out.Why(
            instance_name=d.instance,
            friendly_name=d.spec.name,
            phase=d.status.phase.value,
            why=with_troubles(
                why(d.spec, d.status, plane.clock.now(), plane.unattended()), d.status, await plane.troubles()
            ),
            workdir=d.spec.workdir,
            path=d.spec.env.get("PATH"),
            virtual_env=d.spec.env.get("VIRTUAL_ENV"),
        )
        return json_answer(answer)

    @router.get("/deployments/{name}/ranks", response_model=out.RankList)
    async def list_ranks(request: Request, name: str) -> Response:
        d = await plane.get(_user(request), name)
        reports = await last_reports(plane.runtime, d)
        ranks = [render_rank(plane.shown(r), d.instance, reports.get(r.rank)) for r in shown_ranks(d.spec, d.status)]
        return json_answer(out.RankList(ranks=ranks))

    @router.get("/deployments/{name}/series", response_model=out.SeriesList)
    async def get_series(
        request: Request,
        name: str,
        *,
        rank: Annotated[list[int] | None, Query(max_length=10_000)] = None,
        metric: Annotated[list[str] | None, Query(max_length=100)] = None,
        since: Annotated[float, Query(ge=0, le=1e10, allow_inf_nan=False)] = 0.0,
        points: Annotated[int, Query(ge=2, le=POINTS_MAX)] = POINTS_DEFAULT,
    ) -> Response:
        """The series that ranks reported with `basilica.report`, by rank, worker and metric, over all attempts.

        Each series has at most `points` points: where there are more, neighbours become one, with their mean, minimum
        and maximum. `since`: none from before that moment, in seconds since 1970.
        """
        deployment = await plane.get(_user(request), name)
        for number in rank or ():
            if not 0 <= number < deployment.spec.world.max:
                raise ValidationError("rank", number, f"this run has ranks 0 to {deployment.spec.world.max - 1}")
        query = SeriesQuery(
            ranks=None if rank is None else frozenset(rank),
            metrics=None if metric is None else frozenset(metric),
            since=since,
            points=points,
        )
        found = await plane.runtime.series(run_of(deployment), query)
        return json_answer(out.SeriesList(series=[render_series(s) for s in found]))

    @router.get("/deployments/{name}/checkpoints", response_model=out.CheckpointList)
    async def list_checkpoints(request: Request, name: str) -> Response:
        """The snapshots that `basilica.Progress` keeps, by step and tier, newest first.

        `known` is false where the server cannot read them, as on Kubernetes.
        """
        found = await plane.runtime.checkpoints(await plane.run(_user(request), name))
        rows = [render_checkpoint(each) for each in found or ()]
        return json_answer(out.CheckpointList(checkpoints=rows, known=found is not None))

    @router.get("/deployments/{name}/events", response_model=out.EventList)
    async def list_events(
        request: Request,
        name: str,
        limit: Annotated[int | None, Query(ge=1, le=10_000)] = None,
        since: Version = 0,
    ) -> Response:
        """The events, newest first; equal ones are folded into `count`. `since`: only those after that version."""
        deployment = await plane.get(_user(request), name)
        events = await plane.store.events(deployment.instance, limit=limit, since=since)
        rows = [render_event(plane.shown(e)) for e in events]
        return json_answer(out.EventList(events=rows, version=max([since, *(e.version for e in events)])))

    @router.get("/deployments/{name}/logs", response_class=Response, responses=_LOG_RESPONSES)
    async def get_logs(
        request: Request,
        name: str,
        *,
        rank: Annotated[list[int] | None, Query(max_length=10_000)] = None,
        tail: Annotated[int | None, Query(ge=0, le=2**32 - 1)] = None,
        follow: bool = False,
        since: Annotated[str | None, Query(max_length=100_000)] = None,
        accept: Annotated[str, Header()] = "*/*",
    ) -> Response:
        """The output of ranks as text, or as one JSON object per line with `Accept: application/x-ndjson`.

        Several ranks are merged, each line with `rank| ` before it. `tail`: the last lines of each rank. `follow`:
        until the run has ended. `since`: go on after cursors of an earlier JSON answer, comma-separated.
        """
        deployment = await plane.get(_user(request), name)
        cursors = parse_cursors(since)
        for field, numbers in (("rank", rank or ()), ("since", cursors)):
            for number in numbers:
                if not 0 <= number < deployment.spec.world.max:
                    raise ValidationError(field, number, f"this run has ranks 0 to {deployment.spec.world.max - 1}")
        query = LogQuery(
            ranks=None if rank is None else frozenset(rank),
            tail=tail,
            follow=follow,
            cursors=cursors,
            as_json=NDJSON in accept,
        )
        return await answer_logs(query, deployment, plane.store, plane.runtime, closing)

    @router.get("/deployments/{name}/results", response_model=out.Results)
    async def get_results(request: Request, name: str) -> Response:
        """The ranks' result files: the values that a shipped function returned."""
        found = await plane.runtime.results(await plane.run(_user(request), name))
        return Response(await rendering.run(render_results, found), media_type=JSON)

    @router.post("/deployments/{name}/exec", response_class=Response, responses=_EXEC_RESPONSES)
    async def execute_command(request: Request, name: str) -> Response:
        """Run a command beside a rank, with its environment, directory and limits. The command ends when the caller
        disconnects, its key is revoked, the rank is stopped, or the server ends.

        The answer is one JSON object per line: the command's output, then `exitCode`. Without `exitCode` the command
        was ended or the server lost it, and the last line gives the reason.
        """
        body = inc.parse(inc.ExecBody, await request.body())
        deployment = await plane.get(_user(request), name)
        if body.rank >= deployment.spec.world.max:
            raise ValidationError("rank", body.rank, f"this run has ranks 0 to {deployment.spec.world.max - 1}")
        check_command(body.command)
        output = plane.runtime.execute(run_of(deployment), body.rank, body.command)
        await anext(output)  # a refusal comes here, while it can still be the answer's status
        farewell = final_line(f"{ACCESS_ENDED}, and the command was ended")
        return LastingResponse(stream_output(output, closing), media_type=NDJSON, farewell=farewell)

    # ---- the account and the server --------------------------------------------------------------------------------

    @router.get("/usage", response_model=out.UsageList)
    async def usage(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=1000)] = 50,
        offset: Annotated[int, Query(ge=0, le=2**31)] = 0,
    ) -> Response:
        """Rank-seconds and GPU-seconds by run, how much of the time trained and was lost, newest first; runs that were
        deleted are still counted."""
        rows = plane.shown(tuple(await plane.usage(_user(request), limit, offset)))
        return json_answer(
            out.UsageList(
                usage=[
                    out.UsageRecord(
                        instance_name=row.instance,
                        friendly_name=row.name,
                        rank_seconds=row.rank_seconds,
                        gpu_seconds=row.gpu_seconds,
                        training_seconds=row.training_seconds,
                        lost_seconds=row.lost_seconds,
                        created_at=rfc3339(row.created_at),
                        ended_at=rfc3339_or_none(row.ended_at),
                    )
                    for row in rows
                ]
            )
        )

    @router.get("/health", response_model=out.Health)
    async def health() -> Response:
        """The server's health. A `degraded` server still serves; `troubles` lists its faults."""
        now, troubles = rfc3339(plane.now()), await plane.troubles()
        return json_answer(
            out.Health(
                status="degraded" if troubles else "healthy",
                version=__version__,
                timestamp=now,
                healthy_validators=1,
                total_validators=1,
                troubles=[out.TroubleView(kind=t.kind, message=t.message, remedy=t.remedy) for t in troubles] or None,
            )
        )

    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def prometheus() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    # ---- routes that the published client calls and a self-hosted server has nothing for ---------------------------

    @router.get("/billing/balance", response_model=out.Balance)
    async def balance() -> Response:
        """The balance, which is always zero: this server charges nothing."""
        return json_answer(out.Balance(balance="0", last_updated=rfc3339(plane.now())))

    @router.get("/billing/usage", response_model=out.BillingUsage)
    async def billing_usage(
        limit: Annotated[int, Query(ge=0, le=2**32 - 1)] = 50, offset: Annotated[int, Query(ge=0, le=2**32 - 1)] = 0
    ) -> Response:
        """The list of rentals, which is always empty; the usage of runs is at `/usage`."""
        return json_answer(out.BillingUsage(rentals=[], total_count=0))

    @router.get("/deployments/{name}/share-token", response_model=out.ShareTokenStatus)
    async def share_token_status(request: Request, name: str) -> Response:
        await plane.get(_user(request), name)
        return json_answer(out.ShareTokenStatus(exists=False))

    @router.post("/deployments/{name}/share-token", response_model=out.Problem)
    async def make_share_token(request: Request, name: str) -> Response:
        await plane.get(_user(request), name)
        raise Conflict(NO_SHARING)

    @router.delete("/deployments/{name}/share-token", response_model=out.ShareTokenRevoked)
    async def revoke_share_token(request: Request, name: str) -> Response:
        await plane.get(_user(request), name)
        return json_answer(out.ShareTokenRevoked(revoked=False))

    @router.get("/deployments/{name}/enroll-metadata", response_model=out.Enrolled)
    async def enrolled(request: Request, name: str) -> Response:
        await plane.get(_user(request), name)
        return json_answer(out.Enrolled(public_metadata=False))

    @router.post("/deployments/{name}/enroll-metadata", response_model=out.Enrolled)
    async def enroll(request: Request, name: str) -> Response:
        await plane.get(_user(request), name)
        if inc.parse(inc.EnrollBody, await request.body()).enabled:
            raise AuthorizationError(NO_SHARING)
        return json_answer(out.Enrolled(public_metadata=False))

    @router.get("/public/deployments/{name}/metadata", response_model=out.Problem)
    async def public_metadata(name: str) -> Response:
        raise DeploymentNotFound(name)

    return router


_LOG_RESPONSES: dict[int | str, dict[str, object]] = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}, NDJSON: {"schema": {"type": "string"}}}}
}
_EXEC_RESPONSES: dict[int | str, dict[str, object]] = {200: {"content": {NDJSON: {"schema": {"type": "string"}}}}}
_ARCHIVE_BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}
_SSE = {
    "type": "object",
    "description": "One event. `status`: its data is a DeploymentResponse. `end` and `deleted` are the last.",
    "properties": {
        "event": {"enum": ["status", "end", "deleted"]},
        "id": {"type": "string", "pattern": "^[0-9]+$", "description": "the version to resume after"},
        "data": {"type": "string", "contentMediaType": JSON},
    },
    "required": ["event", "id", "data"],
}
_WATCH_RESPONSES: dict[int | str, dict[str, object]] = {200: {"content": {"text/event-stream": {"schema": _SSE}}}}


def _user(request: Request) -> str:
    user: str = request.scope["state"]["user"]
    return user
