//! The nine methods of `filesystem.Filesystem`.

use std::rc::Rc;

use hyper::Request;
use hyper::body::Incoming;
use hyper::header::HeaderMap;
use wire::filesystem::{
    CreateWatcherResponse, EntryResponse, ListDirRequest, MoveRequest, PathRequest, WatchRequest,
    WatcherEventsResponse, WatcherRequest,
};
use wire::{RpcError, json};

use super::operations;
use super::watch_stream::WatchStream;
use super::watcher::Watcher;
use crate::accounts::User;
use crate::answer::{self, Answer};
use crate::app::App;
use crate::blocking::as_user;
use crate::http::rpc;

/// Answers a call of this service.
pub(crate) async fn call(app: Rc<App>, method: &str, request: Request<Incoming>) -> Answer {
    let caller = Caller::of(&app, request.headers());
    match method {
        "Stat" => rpc::unary(request, async |body| caller?.stat(body).await).await,
        "ListDir" => rpc::unary(request, async |body| caller?.list(body).await).await,
        "MakeDir" => rpc::unary(request, async |body| caller?.make_directory(body).await).await,
        "Move" => rpc::unary(request, async |body| caller?.rename(body).await).await,
        "Remove" => rpc::unary(request, async |body| caller?.remove(body).await).await,
        "WatchDir" => rpc::streaming(request, async |request| watch(&app, caller, request).await).await,
        "CreateWatcher" => rpc::unary(request, async |body| create_watcher(&app, caller?, body).await).await,
        "GetWatcherEvents" => rpc::unary(request, async |body| watcher_events(&app, body)).await,
        "RemoveWatcher" => rpc::unary(request, async |body| remove_watcher(&app, body)).await,
        other => answer::rpc_error(&rpc::no_such_method(other)),
    }
}

/// The user of a call, and where their relative paths start.
struct Caller {
    user: User,
    workdir: Option<String>,
}

impl Caller {
    fn of(app: &App, headers: &HeaderMap) -> Result<Self, RpcError> {
        Ok(Self { user: app.rpc_user(headers)?, workdir: app.settings().default_workdir.clone() })
    }

    fn resolve(&self, path: &str) -> Result<String, RpcError> {
        if path.contains('\0') {
            return Err(RpcError::invalid("a path cannot contain NUL"));
        }
        Ok(wire::path::resolve(path, &self.user.home, self.workdir.as_deref()))
    }

    async fn run<T: Send + 'static>(
        &self,
        operation: impl FnOnce() -> Result<T, RpcError> + Send + 'static,
    ) -> Result<T, RpcError> {
        let done = as_user(&self.user.credentials, operation).await;
        done.unwrap_or_else(|e| Err(RpcError::internal(format!("the operation was lost: {e}"))))
    }

    async fn stat(&self, body: &[u8]) -> Result<Vec<u8>, RpcError> {
        let path = self.resolve(&json::parse::<PathRequest>(body)?.path)?;
        let entry = self.run(move || operations::stat(&path)).await?;
        Ok(json::write(&EntryResponse { entry }))
    }

    async fn list(&self, body: &[u8]) -> Result<Vec<u8>, RpcError> {
        let request: ListDirRequest = json::parse(body)?;
        let path = self.resolve(&request.path)?;
        self.run(move || operations::list(&path, request.depth)).await
    }

    async fn make_directory(&self, body: &[u8]) -> Result<Vec<u8>, RpcError> {
        let path = self.resolve(&json::parse::<PathRequest>(body)?.path)?;
        let entry = self.run(move || operations::make_directory(&path)).await?;
        Ok(json::write(&EntryResponse { entry }))
    }

    async fn rename(&self, body: &[u8]) -> Result<Vec<u8>, RpcError> {
        let request: MoveRequest = json::parse(body)?;
        let (source, destination) = (self.resolve(&request.source)?, self.resolve(&request.destination)?);
        let entry = self.run(move || operations::rename(&source, &destination)).await?;
        Ok(json::write(&EntryResponse { entry }))
    }

    async fn remove(&self, body: &[u8]) -> Result<Vec<u8>, RpcError> {
        let path = self.resolve(&json::parse::<PathRequest>(body)?.path)?;
        self.run(move || operations::remove(&path)).await?;
        Ok(rpc::nothing())
    }
}

async fn watch(
    app: &Rc<App>,
    caller: Result<Caller, RpcError>,
    request: Request<Incoming>,
) -> Result<Answer, RpcError> {
    let (headers, message) = rpc::single_message::<WatchRequest>(request).await?;
    let caller = caller?;
    let options = rpc::StreamOptions::of(&headers)?;
    let path = caller.resolve(&message.path)?;
    let watcher = Watcher::start(&app.watchers, caller.user.credentials, path, &message).await?;
    Ok(answer::stream(WatchStream::new(watcher, options.keepalive, options.deadline)))
}

async fn create_watcher(app: &Rc<App>, caller: Caller, body: &[u8]) -> Result<Vec<u8>, RpcError> {
    let message: WatchRequest = json::parse(body)?;
    let path = caller.resolve(&message.path)?;
    let watcher = Watcher::start(&app.watchers, caller.user.credentials, path, &message).await?;
    Ok(json::write(&CreateWatcherResponse { watcher_id: app.watchers.keep(watcher) }))
}

fn watcher_events(app: &App, body: &[u8]) -> Result<Vec<u8>, RpcError> {
    let watcher = app.watchers.get(&json::parse::<WatcherRequest>(body)?.watcher_id)?;
    Ok(json::write(&WatcherEventsResponse { events: watcher.take_all()? }))
}

fn remove_watcher(app: &App, body: &[u8]) -> Result<Vec<u8>, RpcError> {
    app.watchers.remove(&json::parse::<WatcherRequest>(body)?.watcher_id)?;
    Ok(rpc::nothing())
}
