//! One remote file: from where it lies to an answer that holds the bytes asked for.
//!
//! Credentials go to the address that they were given for and to nowhere else: where a registry sends us
//! for the bytes is asked without.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use reqwest::header::{HeaderValue, LOCATION, WWW_AUTHENTICATE};
use reqwest::{Response, Url};
use rusty_s3::{Bucket, S3Action, UrlStyle};

use super::answer::{self, Promise};
use super::challenge::Challenge;
use super::credentials::Credentials;
use super::failure::Failure;
use super::source::{Addressing, Digest, Remote, Source};
use super::tokens::{basic, bearer};
use super::web::Web;
use crate::error::{Error, Result};

const MAX_REDIRECTIONS: usize = 5;
/// Steps of one attempt: redirections, and answers to challenges.
const MAX_STEPS: usize = 12;
/// A token that ended on the way, and one more; a registry that refuses what it grants is denied.
const MAX_CHALLENGES: usize = 2;
/// How long a redirection is believed. Signed ones last longer than that.
const REDIRECTION_LIFE: Duration = Duration::from_secs(300);
const SIGNED_LIFE: Duration = Duration::from_secs(600);

pub struct Target {
    address: Address,
    /// Where the last request was sent on to.
    followed: Mutex<Option<(Url, Instant)>>,
}

enum Address {
    /// With the path that its credentials go by.
    Http {
        url: Url,
        path: String,
    },
    Oci {
        registry: Url,
        repository: String,
        blob: Url,
    },
    S3 {
        endpoint: Url,
        bucket: Box<Bucket>,
        key: String,
    },
}

/// Bytes on their way.
pub struct Answer {
    pub promise: Promise,
    pub response: Response,
}

/// Why a step was the last one, and when the next attempt is welcome.
pub struct Refusal {
    pub failure: Failure,
    pub after: Option<Duration>,
}

impl From<Failure> for Refusal {
    fn from(failure: Failure) -> Self {
        Self { failure, after: None }
    }
}

impl Target {
    /// # Errors
    /// `invalid` for a source that cannot be.
    pub fn new(remote: &Remote) -> Result<Self> {
        let url = remote.source.check()?;
        let address = match &remote.source {
            Source::Http { .. } => Address::Http { path: url.path().to_owned(), url },
            Source::Oci { repository, .. } => {
                let blob = blob_url(&url, repository, remote.digest)?;
                Address::Oci { registry: url, repository: repository.clone(), blob }
            }
            Source::S3 { bucket, key, region, addressing, .. } => {
                let style = match addressing {
                    Addressing::Path => UrlStyle::Path,
                    Addressing::Virtual => UrlStyle::VirtualHost,
                };
                let made = Bucket::new(url.clone(), style, bucket.clone(), region.clone());
                let bucket = made.map_err(|_| Error::invalid("no such bucket can be"))?;
                Address::S3 { endpoint: url, bucket: Box::new(bucket), key: key.clone() }
            }
        };
        Ok(Self { address, followed: Mutex::default() })
    }

    /// The host that is asked first, which is the one that is counted.
    pub fn host(&self) -> &Url {
        match &self.address {
            Address::Http { url, .. } => url,
            Address::Oci { registry, .. } => registry,
            Address::S3 { endpoint, .. } => endpoint,
        }
    }

    /// Whether anything is known that could open it.
    pub fn has_credentials(&self, web: &Web) -> bool {
        self.credentials(web).is_some()
    }

    /// Asks for *asked* of a file of *size* bytes.
    ///
    /// # Errors
    /// What the last step said.
    pub async fn ask(&self, web: &Web, asked: &Range<u64>, size: u64) -> Result<Answer, Refusal> {
        let (mut redirections, mut challenges) = (0, 0);
        // A redirection may have ended, or have been forgotten by another request: that says nothing about the file.
        let mut stale = true;
        for _ in 0..MAX_STEPS {
            let followed = self.followed();
            let (url, authorization) = match &followed {
                Some(url) => (url.clone(), None),
                None => self.entrance(web)?,
            };
            let response = web.range(&url, authorization.clone(), asked).await?;
            match response.status().as_u16() {
                301 | 302 | 303 | 307 | 308 => {
                    redirections += 1;
                    if redirections > MAX_REDIRECTIONS {
                        break;
                    }
                    let to = redirection(&url, self.host(), &response)?;
                    *self.followed.lock().unwrap_or_else(PoisonError::into_inner) = Some((to, Instant::now()));
                }
                400..=499 if stale && followed.is_some() => {
                    stale = false;
                    self.forget();
                }
                401 if followed.is_none()
                    && challenges < MAX_CHALLENGES
                    && matches!(self.address, Address::Oci { .. }) =>
                {
                    challenges += 1;
                    self.answer_challenge(web, &response, authorization.as_ref()).await?;
                }
                status => {
                    let checked = answer::check(status, response.headers(), asked, size);
                    let failed = |failure| Refusal { failure, after: Web::busy_until(&response) };
                    return match checked {
                        Ok(promise) => Ok(Answer { promise, response }),
                        Err(failure) => {
                            self.forget();
                            Err(failed(failure))
                        }
                    };
                }
            }
        }
        self.forget();
        Err(Failure::Unreachable("the source sends us round and round".into()).into())
    }

    /// The address and what opens it.
    fn entrance(&self, web: &Web) -> Result<(Url, Option<HeaderValue>), Failure> {
        let credentials = self.credentials(web);
        let header = || match credentials.as_deref()? {
            Credentials::Bearer { token } => bearer(token),
            other => basic(other),
        };
        match &self.address {
            Address::Http { url, .. } => Ok((url.clone(), header())),
            Address::Oci { registry, repository, blob } => {
                let given = credentials.as_deref().filter(|given| matches!(given, Credentials::Bearer { .. }));
                let header = if given.is_some() { header() } else { web.tokens.current(registry, repository) };
                Ok((blob.clone(), header))
            }
            Address::S3 { bucket, key, .. } => Ok((signed(bucket, key, credentials.as_deref())?, None)),
        }
    }

    fn credentials(&self, web: &Web) -> Option<std::sync::Arc<Credentials>> {
        match &self.address {
            Address::Http { url, path } => web.vault.find(url, path),
            Address::Oci { registry, repository, .. } => web.vault.find(registry, repository),
            Address::S3 { endpoint, bucket, .. } => web.vault.find(endpoint, bucket.name()),
        }
    }

    async fn answer_challenge(
        &self,
        web: &Web,
        response: &Response,
        used: Option<&HeaderValue>,
    ) -> Result<(), Failure> {
        let Address::Oci { registry, repository, .. } = &self.address else { return Ok(()) };
        let headers = response.headers().get_all(WWW_AUTHENTICATE);
        let challenge = headers.iter().find_map(|value| Challenge::parse(value.to_str().ok()?));
        if matches!(self.credentials(web).as_deref(), Some(Credentials::Bearer { .. })) {
            return Err(Failure::Denied("the registry refuses the token".into()));
        }
        web.tokens.renew(web, registry, repository, challenge, used).await
    }

    fn followed(&self) -> Option<Url> {
        let mut followed = self.followed.lock().unwrap_or_else(PoisonError::into_inner);
        if followed.as_ref().is_some_and(|(_, since)| since.elapsed() > REDIRECTION_LIFE) {
            *followed = None;
        }
        followed.as_ref().map(|(url, _)| url.clone())
    }

    fn forget(&self) {
        *self.followed.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

fn blob_url(registry: &Url, repository: &str, digest: Digest) -> Result<Url> {
    registry.join(&format!("v2/{repository}/blobs/{digest}")).map_err(|_| Error::invalid("no such blob can be"))
}

fn signed(bucket: &Bucket, key: &str, credentials: Option<&Credentials>) -> Result<Url, Failure> {
    match credentials {
        Some(Credentials::S3 { access_key, secret_key, session_token }) => {
            let known = match session_token {
                Some(token) => rusty_s3::Credentials::new_with_token(access_key, secret_key.reveal(), token.reveal()),
                None => rusty_s3::Credentials::new(access_key, secret_key.reveal()),
            };
            Ok(bucket.get_object(Some(&known), key).sign(SIGNED_LIFE))
        }
        Some(_) => Err(Failure::Denied("S3 wants an access key".into())),
        None => Ok(bucket.get_object(None, key).sign(SIGNED_LIFE)),
    }
}

/// Where *response*, which came from *url*, sends us.
fn redirection(url: &Url, first: &Url, response: &Response) -> Result<Url, Failure> {
    let wrong = |what: &str| Failure::Unreachable(format!("a redirection {what}"));
    let to = answer::text(response.headers(), &LOCATION).and_then(|to| url.join(to).ok());
    let to = to.ok_or_else(|| wrong("to nowhere"))?;
    let safe = to.scheme() == "https" || (to.scheme() == "http" && url.scheme() == "http");
    if !safe || !to.username().is_empty() || to.password().is_some() {
        return Err(wrong("to an unsafe place"));
    }
    // A registry of somebody's must not make this host read its own services, or what tells it who it is.
    if is_local(&to) && !is_local(first) {
        return Err(wrong("into this host"));
    }
    Ok(to)
}

fn is_local(url: &Url) -> bool {
    let host = url.host_str().unwrap_or_default().trim_matches(['[', ']']);
    match host.parse::<std::net::IpAddr>() {
        Ok(std::net::IpAddr::V4(ip)) => ip.is_loopback() || ip.is_link_local() || ip.is_unspecified(),
        Ok(std::net::IpAddr::V6(ip)) => {
            let mapped = ip.to_ipv4_mapped().is_some_and(|ip| ip.is_loopback() || ip.is_link_local());
            ip.is_loopback() || ip.is_unspecified() || ip.is_unicast_link_local() || mapped
        }
        Err(_) => host == "localhost" || host.ends_with(".localhost"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_local_address_is_known_in_each_spelling() {
        for text in [
            "http://127.0.0.1",
            "http://[::1]",
            "http://169.254.169.254/x",
            "http://localhost:1",
            "http://0.0.0.0",
            "http://[::ffff:127.0.0.1]",
            "http://2130706433",
        ] {
            assert!(Url::parse(text).is_ok_and(|url| is_local(&url)), "{text}");
        }
        for text in ["http://10.0.0.1", "http://host", "http://[2001:db8::1]"] {
            assert!(Url::parse(text).is_ok_and(|url| !is_local(&url)), "{text}");
        }
    }
}
