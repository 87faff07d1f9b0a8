//! Calls of the node: identity, freezing, power. Guests cannot make them.

use std::rc::Rc;
use std::time::Duration;

use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::Incoming;
use hyper::header::HeaderMap;
use hyper::{Request, StatusCode};
use rustix::process::{Signal, getppid, kill_process};
use wire::frame::MAX_MESSAGE_BYTES;
use wire::init::InitRequest;
use wire::{json, secret};

use crate::answer::{self, Answer};
use crate::app::App;
use crate::cgroup::{FREEZE_LIMIT, Groups, OrderError};
use crate::http::drain;
use crate::{identity, say};

const SECRET_HEADER: &str = "x-agentenv-control";
/// Numbers freezes and thaws, so that one which arrives late is known.
const TURN_HEADER: &str = "x-agentenv-turn";
const MAX_FREEZE_BYTES: usize = 1024;
const MAX_FREEZE_LIMIT: Duration = Duration::from_secs(120);

/// The body of `POST /freeze`, which may be left out.
#[derive(Default, serde::Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct FreezeRequest {
    timeout_ms: Option<u64>,
}

/// Who makes the first `/init` sets the secret, so that one call is trusted: nothing else has run in the sandbox.
/// Except that the image's own init may have, which is why it must come from outside.
fn refusal(app: &App, headers: &HeaderMap, may_be_first: bool) -> Option<Answer> {
    let settings = app.settings();
    if may_be_first && !settings.initialised {
        return None;
    }
    let given = headers.get(SECRET_HEADER).map_or(&b""[..], |v| v.as_bytes());
    match &settings.control_secret {
        Some(expected) if secret::matches(given, expected.as_bytes()) => None,
        _ => Some(answer::error(StatusCode::UNAUTHORIZED, "this call needs the control secret")),
    }
}

pub(crate) async fn init(app: Rc<App>, from_inside: bool, request: Request<Incoming>) -> Answer {
    let (parts, body) = request.into_parts();
    // On a host, for tests, everybody is inside.
    let may_be_first = !(from_inside && app.powers.power);
    if let Some(refused) = refusal(&app, &parts.headers, may_be_first) {
        drain(body);
        return refused;
    }
    let bytes = match Limited::new(body, MAX_MESSAGE_BYTES).collect().await {
        Ok(body) => body.to_bytes(),
        Err(error) if error.is::<LengthLimitError>() => {
            return answer::error(StatusCode::PAYLOAD_TOO_LARGE, "the request is over the limit of 4 MiB");
        }
        Err(error) => return answer::error(StatusCode::BAD_REQUEST, &format!("the request broke off: {error}")),
    };
    // Another first call may have come in between.
    if let Some(refused) = refusal(&app, &parts.headers, may_be_first) {
        return refused;
    }
    let message: InitRequest = match json::parse(if bytes.is_empty() { b"{}" } else { &bytes }) {
        Ok(message) => message,
        Err(failure) => return answer::error(StatusCode::BAD_REQUEST, &failure.message),
    };
    match identity::apply(&app, message) {
        Ok(()) => {
            identity::renew_soon(&app);
            answer::empty(StatusCode::NO_CONTENT)
        }
        Err(identity::Failure::Invalid(text)) => answer::error(StatusCode::BAD_REQUEST, &text),
        Err(identity::Failure::BundleWanted) => {
            answer::error(StatusCode::CONFLICT, "caDigest names a bundle that has to come with it")
        }
        Err(identity::Failure::Step { step, error }) => {
            say!("init failed at step {step}: {error}");
            answer::error(StatusCode::INTERNAL_SERVER_ERROR, &format!("init failed at step {step}: {error}"))
        }
    }
}

pub(crate) async fn freeze(app: Rc<App>, request: Request<Incoming>) -> Answer {
    if let Some(refused) = refusal(&app, request.headers(), false) {
        return refused;
    }
    let Some(groups) = &app.groups else { return no_groups() };
    let Ok(turn) = turn_of(request.headers()) else { return no_turn() };
    let body = Limited::new(request.into_body(), MAX_FREEZE_BYTES).collect().await;
    let bytes = body.map(http_body_util::Collected::to_bytes).unwrap_or_default();
    let wanted: FreezeRequest = match json::parse(if bytes.is_empty() { b"{}" } else { &bytes }) {
        Ok(wanted) => wanted,
        Err(failure) => return answer::error(StatusCode::BAD_REQUEST, &failure.message),
    };
    let limit = wanted.timeout_ms.map_or(FREEZE_LIMIT, |ms| Duration::from_millis(ms).min(MAX_FREEZE_LIMIT));
    match groups.freeze(turn, limit).await {
        Ok(()) => answer::empty(StatusCode::NO_CONTENT),
        Err(OrderError::Late) => late(),
        Err(OrderError::Failed(error)) => answer::error(StatusCode::SERVICE_UNAVAILABLE, &error.to_string()),
    }
}

pub(crate) fn thaw(app: &App, request: &Request<Incoming>) -> Answer {
    if let Some(refused) = refusal(app, request.headers(), false) {
        return refused;
    }
    let Some(groups) = &app.groups else { return no_groups() };
    let Ok(turn) = turn_of(request.headers()) else { return no_turn() };
    match groups.thaw(turn) {
        Ok(()) => answer::empty(StatusCode::NO_CONTENT),
        Err(OrderError::Late) => late(),
        Err(OrderError::Failed(error)) => answer::error(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
    }
}

/// The number of this order; none is fine, and means that it is the latest.
fn turn_of(headers: &HeaderMap) -> Result<Option<u64>, ()> {
    let Some(value) = headers.get(TURN_HEADER) else { return Ok(None) };
    value.to_str().ok().and_then(|text| text.parse().ok()).map(Some).ok_or(())
}

fn no_turn() -> Answer {
    answer::error(StatusCode::BAD_REQUEST, "x-agentenv-turn is not a number of 64 bits")
}

fn late() -> Answer {
    answer::error(StatusCode::CONFLICT, "a later call to freeze or thaw was there first: this one is void")
}

fn no_groups() -> Answer {
    answer::error(StatusCode::NOT_IMPLEMENTED, "control groups are not available here")
}

pub(crate) async fn sync(app: Rc<App>, request: Request<Incoming>) -> Answer {
    if let Some(refused) = refusal(&app, request.headers(), false) {
        return refused;
    }
    match tokio::task::spawn_blocking(rustix::fs::sync).await {
        Ok(()) => answer::empty(StatusCode::NO_CONTENT),
        Err(error) => answer::error(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
    }
}

/// The supervisor syncs and switches off; it gets the signal once this answer is on its way.
pub(crate) async fn shutdown(app: Rc<App>, request: Request<Incoming>) -> Answer {
    if let Some(refused) = refusal(&app, request.headers(), false) {
        return refused;
    }
    if !app.powers.power {
        return answer::error(StatusCode::NOT_IMPLEMENTED, "this daemon does not control a machine");
    }
    let Some(supervisor) = getppid() else {
        return answer::error(StatusCode::INTERNAL_SERVER_ERROR, "there is no supervisor");
    };
    if let Err(error) = tokio::task::spawn_blocking(rustix::fs::sync).await {
        return answer::error(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string());
    }
    tokio::task::spawn_local(async move {
        // Yields, so that the answer is written before the machine is gone.
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        let _ = kill_process(supervisor, Signal::TERM);
    });
    answer::empty(StatusCode::NO_CONTENT)
}

pub(crate) fn agent(app: &App, request: &Request<Incoming>) -> Answer {
    if let Some(refused) = refusal(app, request.headers(), false) {
        return refused;
    }
    let body = serde_json::json!({
        "version": env!("CARGO_PKG_VERSION"),
        "pid": std::process::id(),
        "uptimeMs": u64::try_from(app.started.elapsed().as_millis()).unwrap_or(u64::MAX),
        "frozen": app.groups.as_ref().is_some_and(Groups::is_frozen),
        "processes": app.processes.count(),
    });
    answer::json(StatusCode::OK, body.to_string())
}

pub(crate) fn envs(app: &App) -> Answer {
    answer::json(StatusCode::OK, json::write(&app.settings().environment()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nodes_freeze_and_thaw_are_as_specified() {
        let calls: serde_json::Value =
            serde_json::from_slice(include_bytes!("../../../spec/agent/calls.json")).unwrap();
        let freeze = &calls[2];
        assert_eq!((&freeze["call"], &calls[3]["call"]), (&"POST /freeze".into(), &"POST /thaw".into()));
        let body: FreezeRequest = json::parse(freeze["body"].to_string().as_bytes()).unwrap();
        assert_eq!(body.timeout_ms, Some(5000));
        for call in [freeze, &calls[3]] {
            let mut names: Vec<_> = call["headers"].as_object().unwrap().keys().map(String::as_str).collect();
            names.sort_unstable();
            assert_eq!(names, [SECRET_HEADER, TURN_HEADER]);
        }
    }

    #[test]
    fn a_turn_is_a_number_or_absent() {
        let given =
            |text: &str| turn_of(&HeaderMap::from_iter([(TURN_HEADER.parse().unwrap(), text.parse().unwrap())]));
        assert_eq!(turn_of(&HeaderMap::new()), Ok(None));
        assert_eq!(given("0"), Ok(Some(0)));
        assert_eq!(given("18446744073709551615"), Ok(Some(u64::MAX)));
        for bad in ["", "x", "-1", "1.0", "18446744073709551616"] {
            assert_eq!(given(bad), Err(()), "{bad:?}");
        }
    }
}
