//! What opens sources. It is in memory only: never on disk, never in a message.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use reqwest::Url;
use serde::Deserialize;
use tokio::sync::Notify;

use super::source::origin;
use crate::error::{Code, Error, Result};

/// More than a node has registries and buckets.
const MAX_PLACES: usize = 10_000;

/// A text that cannot be printed.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct Secret(String);

impl Secret {
    pub fn new(text: String) -> Self {
        Self(text)
    }

    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("***")
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Credentials {
    Basic {
        username: String,
        password: Secret,
    },
    Bearer {
        token: Secret,
    },
    S3 {
        access_key: String,
        secret_key: Secret,
        #[serde(default)]
        session_token: Option<Secret>,
    },
}

/// A host, and what is below some path on it: a repository, a bucket, a folder.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Place {
    origin: String,
    path: String,
}

#[derive(Default)]
pub struct Vault {
    known: Mutex<HashMap<Place, Arc<Credentials>>>,
    changed: Notify,
}

impl Vault {
    /// From now on *credentials* open what is at *address* and at or below *path* there; or nothing does.
    ///
    /// # Errors
    /// `invalid` for an address that is none, `exhausted` for too many.
    pub fn set(&self, address: &str, path: &str, credentials: Option<Credentials>) -> Result<Url> {
        let url = origin(address)?;
        let place = Place { origin: url.origin().ascii_serialization(), path: path.trim_matches('/').to_owned() };
        let mut known = self.known();
        match credentials {
            Some(credentials) => {
                if known.len() >= MAX_PLACES && !known.contains_key(&place) {
                    return Err(Error::new(Code::Exhausted, format!("{MAX_PLACES} places have credentials")));
                }
                known.insert(place, Arc::new(credentials));
            }
            None => drop(known.remove(&place)),
        }
        drop(known);
        self.changed.notify_waiters();
        Ok(url)
    }

    /// What opens *path* at *url*: of the places that it is in, the innermost's.
    pub fn find(&self, url: &Url, path: &str) -> Option<Arc<Credentials>> {
        let known = self.known();
        let mut place = Place { origin: url.origin().ascii_serialization(), path: path.trim_matches('/').to_owned() };
        loop {
            if let Some(found) = known.get(&place) {
                return Some(Arc::clone(found));
            }
            if place.path.is_empty() {
                return None;
            }
            let end = place.path.rfind('/').unwrap_or(0);
            place.path.truncate(end);
        }
    }

    /// Waits until some are set or removed.
    pub async fn wait_changed(&self) {
        self.changed.notified().await;
    }

    fn known(&self) -> MutexGuard<'_, HashMap<Place, Arc<Credentials>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bearer(token: &str) -> Credentials {
        Credentials::Bearer { token: Secret::new(token.into()) }
    }

    #[test]
    fn the_innermost_place_counts_and_other_hosts_do_not() -> Result<()> {
        let vault = Vault::default();
        vault.set("https://host", "", Some(bearer("all")))?;
        vault.set("https://host:443/", "a/b", Some(bearer("inner")))?;
        let url = origin("https://host")?;
        let found = |path: &str| vault.find(&url, path);
        assert_eq!(found("a/b/c").as_deref(), Some(&bearer("inner")));
        assert_eq!(found("a/bc").as_deref(), Some(&bearer("all")));
        assert_eq!(found("").as_deref(), Some(&bearer("all")));
        assert_eq!(vault.find(&origin("http://host")?, "a/b"), None);
        assert_eq!(vault.find(&origin("https://host:444")?, "a/b"), None);
        vault.set("https://host", "a/b", None)?;
        assert_eq!(found("a/b").as_deref(), Some(&bearer("all")));
        Ok(())
    }

    #[test]
    fn a_secret_is_not_printed() {
        let basic = Credentials::Basic { username: "u".into(), password: Secret::new("hidden".into()) };
        assert!(!format!("{basic:?} {:?}", bearer("hidden")).contains("hidden"));
    }
}
