//! HTTP: connections, routes, and the two kinds of remote call.

mod route;
pub(crate) mod rpc;
mod server;

use std::time::Duration;

use http_body_util::BodyExt;
use hyper::body::Incoming;

pub(crate) use server::{listen, serve};

/// How long a body that nobody wants is still read.
const DRAIN_LIMIT: Duration = Duration::from_secs(5);

/// Reads the rest of a refused request, so that its sender gets to see the answer instead of a broken connection.
pub(crate) fn drain(mut body: Incoming) {
    tokio::task::spawn_local(async move {
        let _ = tokio::time::timeout(DRAIN_LIMIT, async { while let Some(Ok(_)) = body.frame().await {} }).await;
    });
}
