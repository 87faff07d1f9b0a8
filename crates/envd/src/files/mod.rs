//! `/files`: whole files over plain HTTP, of any size in constant memory.

mod download;
mod upload;

pub(crate) use upload::METADATA_ATTRIBUTE;

use std::io;
use std::rc::Rc;
use std::time::{SystemTime, UNIX_EPOCH};

use hyper::body::Incoming;
use hyper::header::HeaderMap;
use hyper::{Request, StatusCode};
use wire::signature::{Operation, sign};
use wire::{Code, query, secret};

use crate::accounts::User;
use crate::answer::{self, Answer};
use crate::app::App;
use crate::http::drain;

/// Bytes read or written in one step.
const CHUNK_BYTES: usize = 64 << 10;

/// Why a file was not sent or taken.
#[derive(Debug)]
struct Refused {
    status: StatusCode,
    message: String,
}

impl Refused {
    fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into() }
    }

    fn bad(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    fn io(path: &str, error: &io::Error) -> Self {
        let status = match error.kind() {
            io::ErrorKind::NotFound => StatusCode::NOT_FOUND,
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => StatusCode::FORBIDDEN,
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => StatusCode::INSUFFICIENT_STORAGE,
            io::ErrorKind::IsADirectory
            | io::ErrorKind::NotADirectory
            | io::ErrorKind::InvalidInput
            | io::ErrorKind::InvalidFilename => StatusCode::BAD_REQUEST,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self::new(status, format!("{path}: {error}"))
    }
}

impl From<Refused> for Answer {
    fn from(refused: Refused) -> Self {
        answer::error(refused.status, &refused.message)
    }
}

pub(crate) async fn download(app: Rc<App>, request: Request<Incoming>) -> Answer {
    let headers = request.headers();
    match Target::of(&app, headers, request.uri().query(), Operation::Read) {
        Err(refused) => refused.into(),
        Ok(target) => download::send(target, headers).await.unwrap_or_else(Answer::from),
    }
}

pub(crate) async fn upload(app: Rc<App>, request: Request<Incoming>) -> Answer {
    let (parts, body) = request.into_parts();
    match Target::of(&app, &parts.headers, parts.uri.query(), Operation::Write) {
        Err(refused) => {
            drain(body);
            refused.into()
        }
        Ok(target) => upload::receive(target, &parts.headers, body).await.unwrap_or_else(Answer::from),
    }
}

/// Whose file is meant, and where relative paths start.
struct Target {
    user: User,
    workdir: Option<String>,
    /// As in the query, unresolved.
    path: Option<String>,
}

impl Target {
    fn of(app: &App, headers: &HeaderMap, query: Option<&str>, operation: Operation) -> Result<Self, Refused> {
        let query = query.unwrap_or("");
        let (path, username) = (query::value(query, "path"), query::value(query, "username"));
        authorise(app, headers, query, operation, path.as_deref().unwrap_or(""), username.as_deref().unwrap_or(""))?;
        let user = app.user(username.as_deref()).map_err(|e| match e.code {
            Code::Unauthenticated => Refused::new(StatusCode::UNAUTHORIZED, e.message),
            _ => Refused::new(StatusCode::INTERNAL_SERVER_ERROR, e.message),
        })?;
        Ok(Self { user, workdir: app.settings().default_workdir.clone(), path })
    }

    /// The absolute form of *path* for this user.
    fn resolve(&self, path: &str) -> Result<String, Refused> {
        if path.contains('\0') {
            return Err(Refused::bad("a path cannot contain NUL"));
        }
        Ok(wire::path::resolve(path, &self.user.home, self.workdir.as_deref()))
    }
}

/// A token in a header decides; without one a valid signature does.
fn authorise(
    app: &App,
    headers: &HeaderMap,
    query: &str,
    operation: Operation,
    path: &str,
    username: &str,
) -> Result<(), Refused> {
    let refused = |text: &str| Err(Refused::new(StatusCode::UNAUTHORIZED, text));
    let settings = app.settings();
    let Some(token) = settings.access_token.as_deref() else { return Ok(()) };
    match app.token_given(headers) {
        Some(true) => return Ok(()),
        Some(false) => return refused("the access token is wrong"),
        None => {}
    }
    let Some(given) = query::value(query, "signature") else {
        return refused("an access token or a signature is needed");
    };
    let expiration = query::value(query, "signature_expiration");
    let expected = sign(path, operation, username, token, expiration.as_deref());
    if !secret::matches(given.as_bytes(), expected.as_bytes()) {
        return refused("the signature is wrong");
    }
    let Some(expiration) = expiration else { return Ok(()) };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_secs());
    match expiration.parse::<u64>() {
        Ok(at) if now <= at => Ok(()),
        _ => refused("the signature has expired"),
    }
}
