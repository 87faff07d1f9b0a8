//! Requests to other hosts: one thread for all of them, and a bound on each wait.

use std::collections::HashMap;
use std::future::Future;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use reqwest::header::{ACCEPT_ENCODING, AUTHORIZATION, HeaderValue, RANGE};
use reqwest::{Certificate, Client, Response, Url, redirect};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use super::answer;
use super::credentials::Vault;
use super::failure::Failure;
use super::tokens::Tokens;
use crate::error::{Context, Error, Result};

/// Requests to one host at once: a host that stalls holds up only its own.
const REQUESTS_PER_HOST: usize = 16;
const MAX_REMEMBERED_HOSTS: usize = 10_000;
/// More than any token; less than anyone would miss.
const MAX_DOCUMENT_BYTES: usize = 1 << 20;

/// How long to wait for what.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// Without a single block more, however often it is tried.
    pub progress: Duration,
    pub connect: Duration,
    /// For the first byte of an answer, and from one byte to the next.
    pub silence: Duration,
}

impl Patience {
    /// All of it in proportion to how long a reader waits at most for one block.
    pub fn of(progress: Duration) -> Self {
        Self { progress, connect: progress / 6, silence: progress / 3 }
    }
}

pub struct Web {
    /// There until it is dropped, which a thread of it may do.
    runtime: Option<Runtime>,
    client: Client,
    pub vault: Vault,
    pub tokens: Tokens,
    pub patience: Patience,
    permits: Mutex<HashMap<String, Arc<Semaphore>>>,
}

impl Web {
    /// *authorities*: certificates to trust besides those that the host trusts, in PEM.
    ///
    /// # Errors
    /// `invalid` for a file that holds no certificates; `exhausted` without threads.
    pub fn new(patience: Patience, authorities: Option<&Path>) -> Result<Arc<Self>> {
        let mut client = Client::builder()
            .connect_timeout(patience.connect)
            .read_timeout(patience.silence)
            .pool_max_idle_per_host(REQUESTS_PER_HOST)
            .pool_idle_timeout(Duration::from_secs(60))
            .tcp_nodelay(true)
            // Followed by us: whoever gets to see credentials is decided in one place.
            .redirect(redirect::Policy::none())
            .no_proxy()
            .user_agent(concat!("storaged/", env!("CARGO_PKG_VERSION")));
        if let Some(path) = authorities {
            for certificate in certificates(path)? {
                client = client.add_root_certificate(certificate);
            }
        }
        let client = client.build().map_err(|e| Error::invalid(format!("no client for HTTP: {}", plain(&e))))?;
        // One thread is enough for what a network brings, and more would idle on every node.
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .max_blocking_threads(2)
            .thread_name("remote")
            .enable_all()
            .build()
            .during("no thread for remote layers")?;
        let (vault, tokens, permits) = (Vault::default(), Tokens::default(), Mutex::default());
        let runtime = Some(runtime);
        Ok(Arc::new(Self { runtime, client, vault, tokens, patience, permits }))
    }

    /// Has *work* done while the caller goes on.
    pub fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        if let Some(runtime) = &self.runtime {
            drop(runtime.spawn(work));
        }
    }

    /// Waits for a turn at the host of *url*.
    pub async fn turn(&self, url: &Url) -> Option<OwnedSemaphorePermit> {
        let permits = {
            let mut permits = self.permits.lock().unwrap_or_else(PoisonError::into_inner);
            if permits.len() >= MAX_REMEMBERED_HOSTS {
                permits.retain(|_, permits| Arc::strong_count(permits) > 1);
            }
            let host = url.origin().ascii_serialization();
            let new = || Arc::new(Semaphore::new(REQUESTS_PER_HOST));
            Arc::clone(permits.entry(host).or_insert_with(new))
        };
        permits.acquire_owned().await.ok()
    }

    /// Asks for *range* of what is at *url*.
    ///
    /// # Errors
    /// Unreachable; whatever the server says comes as an answer.
    pub async fn range(
        &self,
        url: &Url,
        authorization: Option<HeaderValue>,
        range: &Range<u64>,
    ) -> Result<Response, Failure> {
        let request = self
            .client
            .get(url.clone())
            .header(RANGE, format!("bytes={}-{}", range.start, range.end - 1))
            .header(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        self.send(request, authorization).await
    }

    /// A small document, whole.
    ///
    /// # Errors
    /// Any failure; [`Failure::Denied`] for credentials that are not accepted.
    pub async fn document(&self, url: Url, authorization: Option<HeaderValue>) -> Result<Vec<u8>, Failure> {
        let mut response = self.send(self.client.get(url), authorization).await?;
        match response.status().as_u16() {
            200 => (),
            status @ (401 | 403) => return Err(Failure::Denied(format!("status {status}"))),
            status @ (404 | 410) => return Err(Failure::Absent(format!("status {status}"))),
            status => return Err(Failure::Unreachable(format!("status {status}"))),
        }
        let mut document = Vec::new();
        while let Some(part) = self.chunk(&mut response).await? {
            if document.len() + part.len() > MAX_DOCUMENT_BYTES {
                return Err(Failure::Corrupt("an answer without end".into()));
            }
            document.extend_from_slice(&part);
        }
        Ok(document)
    }

    async fn send(
        &self,
        request: reqwest::RequestBuilder,
        authorization: Option<HeaderValue>,
    ) -> Result<Response, Failure> {
        let request = match authorization {
            Some(value) => request.header(AUTHORIZATION, value),
            None => request,
        };
        let limit = self.patience.connect + self.patience.silence;
        match timeout(limit, request.send()).await {
            Ok(Ok(response)) => Ok(response),
            Ok(Err(error)) => Err(Failure::Unreachable(plain(&error))),
            Err(_) => Err(Failure::Unreachable("no answer in time".into())),
        }
    }

    /// The next bytes of an answer; nothing at its end.
    ///
    /// # Errors
    /// Unreachable when it breaks off or stalls.
    pub async fn chunk(&self, response: &mut Response) -> Result<Option<Bytes>, Failure> {
        match timeout(self.patience.silence, response.chunk()).await {
            Ok(Ok(part)) => Ok(part),
            Ok(Err(error)) => Err(Failure::Unreachable(plain(&error))),
            Err(_) => Err(Failure::Unreachable("the answer stalls".into())),
        }
    }

    /// When a server that is busy wants to be asked again.
    pub fn busy_until(response: &Response) -> Option<Duration> {
        answer::retry_after(response.headers())
    }
}

impl Drop for Web {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

fn certificates(path: &Path) -> Result<Vec<Certificate>> {
    let what = format_args!("the certificates in {}", path.display()).to_string();
    let bytes = std::fs::read(path).during(&what)?;
    let found = Certificate::from_pem_bundle(&bytes).map_err(|_| Error::invalid(format!("{what} cannot be read")))?;
    if found.is_empty() {
        return Err(Error::invalid(format!("{what}: there are none")));
    }
    Ok(found)
}

/// What went wrong, down to its cause, and without the address: that may be signed.
fn plain(error: &reqwest::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    let what = match error {
        e if e.is_timeout() => "no answer in time",
        e if e.is_connect() => "cannot connect",
        e if e.is_body() || e.is_decode() => "the answer breaks off",
        e if e.is_builder() => "cannot be asked for",
        _ => "no answer",
    };
    if std::ptr::addr_eq(std::ptr::from_ref(cause), std::ptr::from_ref(error)) {
        return what.to_owned();
    }
    format!("{what}: {cause}")
}
