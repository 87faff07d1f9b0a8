//! Which handler answers a request, and who may ask.

use std::rc::Rc;

use hyper::body::Incoming;
use hyper::header::ALLOW;
use hyper::header::HeaderValue;
use hyper::{Method, Request, StatusCode};

use super::drain;
use crate::answer::{self, Answer};
use crate::app::App;
use crate::{control, files, filesystem, metrics, process};

const PROCESS: &str = "/process.Process/";
const FILESYSTEM: &str = "/filesystem.Filesystem/";

/// Answers one request, which may come from a process of the sandbox itself.
pub(super) async fn answer(app: Rc<App>, from_inside: bool, request: Request<Incoming>) -> Answer {
    let get = matches!(*request.method(), Method::GET | Method::HEAD);
    let post = *request.method() == Method::POST;
    match request.uri().path() {
        "/health" if get => answer::empty(StatusCode::NO_CONTENT),
        "/init" if post => control::init(app, from_inside, request).await,
        "/freeze" if post => control::freeze(app, request).await,
        "/thaw" if post => control::thaw(&app, &request),
        "/sync" if post => control::sync(app, request).await,
        "/shutdown" if post => control::shutdown(app, request).await,
        "/agent" if get => control::agent(&app, &request),
        // These decide themselves who may ask: a signature can stand in for the token.
        "/files" if get => files::download(app, request).await,
        "/files" if post => files::upload(app, request).await,
        path => match guarded(path, get, post) {
            Some(call) => match app.token_refusal(request.headers()) {
                Some(refused) => refuse(request, refused),
                None => call.answer(app, request).await,
            },
            None => nothing_here(request),
        },
    }
}

/// What needs the access token, if there is one.
enum Guarded {
    Metrics,
    Envs,
    Process(String),
    Filesystem(String),
}

fn guarded(path: &str, get: bool, post: bool) -> Option<Guarded> {
    let method = |service: &str| path.strip_prefix(service).filter(|_| post).map(str::to_owned);
    match path {
        "/metrics" if get => Some(Guarded::Metrics),
        "/envs" if get => Some(Guarded::Envs),
        _ => method(PROCESS).map(Guarded::Process).or_else(|| method(FILESYSTEM).map(Guarded::Filesystem)),
    }
}

impl Guarded {
    async fn answer(self, app: Rc<App>, request: Request<Incoming>) -> Answer {
        match self {
            Self::Metrics => metrics::answer(&app),
            Self::Envs => control::envs(&app),
            Self::Process(method) => process::service::call(app, &method, request).await,
            Self::Filesystem(method) => filesystem::service::call(app, &method, request).await,
        }
    }
}

fn nothing_here(request: Request<Incoming>) -> Answer {
    let refused = match methods_of(request.uri().path()) {
        "" => answer::error(StatusCode::NOT_FOUND, "there is nothing at this path"),
        methods => {
            let mut refused = answer::error(StatusCode::METHOD_NOT_ALLOWED, "this path does not answer that method");
            refused.headers_mut().insert(ALLOW, HeaderValue::from_static(methods));
            refused
        }
    };
    refuse(request, refused)
}

fn methods_of(path: &str) -> &'static str {
    match path {
        "/health" | "/agent" | "/metrics" | "/envs" => "GET, HEAD",
        "/init" | "/freeze" | "/thaw" | "/sync" | "/shutdown" => "POST",
        "/files" => "GET, HEAD, POST",
        path if path.starts_with(PROCESS) || path.starts_with(FILESYSTEM) => "POST",
        _ => "",
    }
}

fn refuse(request: Request<Incoming>, refused: Answer) -> Answer {
    drain(request.into_body());
    refused
}
