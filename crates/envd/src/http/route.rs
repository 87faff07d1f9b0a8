//! Which handler answers a request, and who may ask.

use std::rc::Rc;

use hyper::body::Incoming;
use hyper::header::ALLOW;
use hyper::header::HeaderValue;
use hyper::{Method, Request, StatusCode};

use super::drain;
use crate::answer::{self, Answer};
use crate::app::App;
use crate::{control, files, metrics, process};

const PROCESS: &str = "/process.Process/";

/// Answers one request.
pub(super) async fn answer(app: Rc<App>, request: Request<Incoming>) -> Answer {
    let get = matches!(*request.method(), Method::GET | Method::HEAD);
    let post = *request.method() == Method::POST;
    match request.uri().path() {
        "/health" if get => answer::empty(StatusCode::NO_CONTENT),
        "/init" if post => control::init(app, request).await,
        "/freeze" if post => control::freeze(app, request).await,
        "/thaw" if post => control::thaw(&app, &request),
        "/sync" if post => control::sync(app, request).await,
        "/shutdown" if post => control::shutdown(app, request).await,
        "/agent" if get => control::agent(&app, &request),
        // These decide themselves who may ask: a signature can stand in for the token.
        "/files" if get => files::download(app, request).await,
        "/files" if post => files::upload(app, request).await,
        "/metrics" if get => {
            app.require_token(request.headers()).map_or_else(|refused| refused, |()| metrics::answer(&app))
        }
        "/envs" if get => app.require_token(request.headers()).map_or_else(|refused| refused, |()| control::envs(&app)),
        path if post && path.starts_with(PROCESS) => match app.require_token(request.headers()) {
            Ok(()) => {
                let method = path[PROCESS.len()..].to_owned();
                process::service::call(app, &method, request).await
            }
            Err(refused) => refuse(request, refused),
        },
        path => {
            let allowed = methods_of(path);
            let refused = match allowed {
                "" => answer::error(StatusCode::NOT_FOUND, "there is nothing at this path"),
                methods => {
                    let mut refused =
                        answer::error(StatusCode::METHOD_NOT_ALLOWED, "this path does not answer that method");
                    refused.headers_mut().insert(ALLOW, HeaderValue::from_static(methods));
                    refused
                }
            };
            refuse(request, refused)
        }
    }
}

fn methods_of(path: &str) -> &'static str {
    match path {
        "/health" | "/agent" | "/metrics" | "/envs" => "GET, HEAD",
        "/init" | "/freeze" | "/thaw" | "/sync" | "/shutdown" => "POST",
        "/files" => "GET, HEAD, POST",
        path if path.starts_with(PROCESS) => "POST",
        _ => "",
    }
}

fn refuse(request: Request<Incoming>, refused: Answer) -> Answer {
    drain(request.into_body());
    refused
}
