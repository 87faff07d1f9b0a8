//! Tokens of registries: got once for a repository, shared by all layers in it, and got anew when they end.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use reqwest::Url;
use reqwest::header::HeaderValue;
use serde::Deserialize;

use super::challenge::Challenge;
use super::credentials::{Credentials, Secret};
use super::failure::Failure;
use super::web::Web;

/// What the specification says of a token that does not say how long it is good.
const USUAL_LIFE_S: u64 = 60;
const MIN_LIFE_S: u64 = 10;
const MAX_LIFE_S: u64 = 3600;
const MAX_REPOSITORIES: usize = 10_000;

#[derive(Default)]
pub struct Tokens {
    repositories: Mutex<HashMap<(String, String), Arc<Repository>>>,
}

#[derive(Default)]
struct Repository {
    /// Held by the one who gets a token, while the others wait for it.
    getting: tokio::sync::Mutex<()>,
    token: Mutex<Option<(HeaderValue, Instant)>>,
}

#[derive(Deserialize)]
struct Granted {
    token: Option<Secret>,
    access_token: Option<Secret>,
    expires_in: Option<u64>,
}

impl Tokens {
    fn repository(&self, registry: &Url, name: &str) -> Arc<Repository> {
        let mut all = self.repositories.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() >= MAX_REPOSITORIES {
            all.retain(|_, repository| Arc::strong_count(repository) > 1);
        }
        Arc::clone(all.entry((registry.origin().ascii_serialization(), name.to_owned())).or_default())
    }

    /// What to send with a request, if it is known to be needed.
    pub fn current(&self, registry: &Url, name: &str) -> Option<HeaderValue> {
        self.repository(registry, name).current()
    }

    /// Credentials at *registry* are others now.
    pub fn forget(&self, registry: &Url) {
        let host = registry.origin().ascii_serialization();
        self.repositories.lock().unwrap_or_else(PoisonError::into_inner).retain(|(origin, _), _| *origin != host);
    }

    /// A request with *used* was refused with *challenge*: gets what will not be.
    ///
    /// # Errors
    /// Denied when there is nothing else to try; any failure of asking for a token.
    pub async fn renew(
        &self,
        web: &Web,
        registry: &Url,
        name: &str,
        challenge: Option<Challenge>,
        used: Option<&HeaderValue>,
    ) -> Result<(), Failure> {
        let repository = self.repository(registry, name);
        let _turn = repository.getting.lock().await;
        if repository.current().as_ref() != used {
            return Ok(()); // somebody else was faster
        }
        let denied = |what: &str| Failure::Denied(what.to_owned());
        let credentials = web.vault.find(registry, name);
        let basic = credentials.as_deref().and_then(basic);
        let (value, life) = match challenge.ok_or_else(|| denied("the registry does not say how to get in"))? {
            Challenge::Basic => (basic.ok_or_else(|| denied("the registry wants credentials"))?, MAX_LIFE_S),
            bearer @ Challenge::Bearer { .. } => {
                let url = bearer.token_url(registry, name);
                let url = url.ok_or_else(|| denied("the registry sends us to an unsafe place for a token"))?;
                let document = web.document(url, basic).await.map_err(|e| e.of("asking for a token"))?;
                granted(&document).ok_or_else(|| Failure::Corrupt("what should hold a token holds none".into()))?
            }
        };
        if used == Some(&value) {
            return Err(denied("credentials are refused"));
        }
        // A little earlier than it ends, so that a request never meets its end on the way.
        let until = Instant::now() + Duration::from_secs(life) * 4 / 5;
        *repository.token() = Some((value, until));
        Ok(())
    }
}

impl Repository {
    fn token(&self) -> MutexGuard<'_, Option<(HeaderValue, Instant)>> {
        self.token.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn current(&self) -> Option<HeaderValue> {
        self.token().as_ref().filter(|(_, until)| Instant::now() < *until).map(|(value, _)| value.clone())
    }
}

fn granted(document: &[u8]) -> Option<(HeaderValue, u64)> {
    let granted: Granted = serde_json::from_slice(document).ok()?;
    let token = granted.token.or(granted.access_token).filter(|token| !token.reveal().is_empty())?;
    let life = granted.expires_in.unwrap_or(USUAL_LIFE_S).clamp(MIN_LIFE_S, MAX_LIFE_S);
    Some((bearer(&token)?, life))
}

/// The header for *credentials*, if they are a name and a password.
pub(super) fn basic(credentials: &Credentials) -> Option<HeaderValue> {
    let Credentials::Basic { username, password } = credentials else { return None };
    let joined = BASE64.encode(format!("{username}:{}", password.reveal()));
    hidden(format!("Basic {joined}"))
}

pub(super) fn bearer(token: &Secret) -> Option<HeaderValue> {
    hidden(format!("Bearer {}", token.reveal()))
}

fn hidden(text: String) -> Option<HeaderValue> {
    let mut value = HeaderValue::try_from(text).ok()?;
    value.set_sensitive(true);
    Some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_goes_by_two_names_and_lives_for_a_bounded_time() {
        let life = |text: &str| granted(text.as_bytes()).map(|(_, life)| life);
        assert_eq!(life(r#"{"token": "a"}"#), Some(60));
        assert_eq!(life(r#"{"access_token": "a", "expires_in": 300}"#), Some(300));
        assert_eq!(life(r#"{"token": "a", "expires_in": 999999999}"#), Some(3600));
        for bad in ["", "{}", r#"{"token": ""}"#, r#"{"token": "a\nb"}"#, "[]"] {
            assert_eq!(life(bad), None, "{bad}");
        }
    }
}
