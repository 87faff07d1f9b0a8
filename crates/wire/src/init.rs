//! The body of `POST /init`: what a sandbox is told about itself after a start or a restore.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};

use crate::json;

/// A field that can be left alone, removed or set.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Change<T> {
    #[default]
    Keep,
    Remove,
    Set(T),
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Change<T> {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        Ok(Option::deserialize(input)?.map_or(Self::Remove, Self::Set))
    }
}

/// Absent fields leave things as they are, except `thaw`, which is true unless it is said to be false.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct InitRequest {
    pub access_token: Change<String>,
    pub env_vars: Option<BTreeMap<String, String>>,
    /// RFC 3339.
    pub timestamp: Option<String>,
    pub default_user: Option<String>,
    pub default_workdir: Option<String>,
    /// PEM.
    pub ca_bundle: Option<String>,
    /// Names the bundle that the sandbox is to have. With one that it does not have, and no `caBundle`, nothing is
    /// done and the answer is 409: the bundle is large, and nearly every restored sandbox has it.
    pub ca_digest: Option<String>,
    pub hostname: Option<String>,
    /// 32 hexadecimal digits.
    pub machine_id: Option<String>,
    #[serde(deserialize_with = "json::optional_bytes")]
    pub entropy: Option<Vec<u8>>,
    pub sandbox_id: Option<String>,
    pub template_id: Option<String>,
    pub control_secret: Option<String>,
    pub thaw: Option<bool>,
}

/// What `/init` set and a restarted daemon must still know.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Settings {
    /// Whether a first `/init` has been answered.
    pub initialised: bool,
    pub control_secret: Option<String>,
    pub access_token: Option<String>,
    pub env_vars: BTreeMap<String, String>,
    pub default_user: Option<String>,
    pub default_workdir: Option<String>,
    pub sandbox_id: Option<String>,
    pub template_id: Option<String>,
    /// What was installed in the system's CA bundle; tools are then pointed at it.
    pub ca_installed: Option<String>,
    /// The `caDigest` that came with it.
    pub ca_digest: Option<String>,
    /// The sandbox that the image's SSH host keys were made for.
    pub host_keys_of: Option<String>,
}

impl Settings {
    /// The variables every process gets, in the order in which later ones win.
    pub fn environment(&self) -> BTreeMap<String, String> {
        let mut all = BTreeMap::new();
        if self.ca_installed.is_some() {
            for name in CA_VARIABLES {
                all.insert(name.to_owned(), CA_BUNDLE_PATH.to_owned());
            }
        }
        all.insert("E2B_SANDBOX".to_owned(), "true".to_owned());
        for (name, value) in [("E2B_SANDBOX_ID", &self.sandbox_id), ("E2B_TEMPLATE_ID", &self.template_id)] {
            if let Some(value) = value {
                all.insert(name.to_owned(), value.clone());
            }
        }
        all.extend(self.env_vars.iter().map(|(name, value)| (name.clone(), value.clone())));
        all
    }
}

/// Where most distributions keep the bundle that TLS libraries read.
pub const CA_BUNDLE_PATH: &str = "/etc/ssl/certs/ca-certificates.crt";

/// Variables by which tools that bring their own bundle are told of another.
const CA_VARIABLES: [&str; 5] =
    ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS", "PIP_CERT", "CURL_CA_BUNDLE"];

/// A host name made of what was asked for: lower case letters, digits and inner hyphens, at most 63 of them.
pub fn sanitise_hostname(name: &str) -> String {
    let mapped: String =
        name.chars().map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' }).collect();
    let short: String = mapped.trim_matches('-').chars().take(63).collect();
    let trimmed = short.trim_end_matches('-');
    if trimmed.is_empty() { "sandbox".to_owned() } else { trimmed.to_owned() }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_token_can_be_kept_removed_or_set() {
        for (text, expected) in [
            ("{}", Change::Keep),
            (r#"{"accessToken":null}"#, Change::Remove),
            (r#"{"accessToken":"t"}"#, Change::Set("t".to_owned())),
        ] {
            assert_eq!(json::parse::<InitRequest>(text.as_bytes()).unwrap().access_token, expected, "{text}");
        }
    }

    #[test]
    fn the_nodes_init_is_understood_as_specified() {
        let calls: serde_json::Value =
            serde_json::from_slice(include_bytes!("../../../spec/agent/calls.json")).unwrap();
        let body = |number: usize| json::parse::<InitRequest>(calls[number]["body"].to_string().as_bytes()).unwrap();
        let said = |number: usize, name: &str| calls[number]["body"][name].as_str().map(str::to_owned);
        assert_eq!((&calls[0]["call"], &calls[1]["call"]), (&"POST /init".into(), &"POST /init".into()));
        assert_eq!(body(0).ca_bundle, None);

        let full = body(1);
        assert_eq!(full.access_token, Change::Set("token".to_owned()));
        assert_eq!(
            full.env_vars.unwrap(),
            [("EMPTY", ""), ("LANG", "C.UTF-8")].map(|(k, v)| (k.into(), v.into())).into()
        );
        assert_eq!(full.entropy.unwrap(), (0..64).collect::<Vec<u8>>());
        let now = crate::time::Timestamp::parse(&full.timestamp.unwrap()).unwrap();
        assert_eq!((now.seconds, now.nanos), (1_767_323_045, 678_901_000));
        assert_eq!(full.thaw, None);
        for (name, value) in [
            ("defaultUser", full.default_user),
            ("defaultWorkdir", full.default_workdir),
            ("caBundle", full.ca_bundle),
            ("caDigest", full.ca_digest),
            ("hostname", full.hostname),
            ("machineId", full.machine_id),
            ("sandboxId", full.sandbox_id),
            ("templateId", full.template_id),
            ("controlSecret", full.control_secret),
        ] {
            assert!(value.is_some(), "{name}");
            assert_eq!(value, said(1, name), "{name}");
        }
    }

    #[test]
    fn the_sandbox_variables_can_be_overridden_by_env_vars() {
        let settings = Settings {
            sandbox_id: Some("id".into()),
            env_vars: BTreeMap::from([("E2B_SANDBOX".into(), "mine".into())]),
            ..Settings::default()
        };
        let all = settings.environment();
        assert_eq!(all["E2B_SANDBOX"], "mine");
        assert_eq!(all["E2B_SANDBOX_ID"], "id");
        assert!(!all.contains_key("SSL_CERT_FILE"));
    }

    proptest! {
        #[test]
        fn any_name_becomes_a_label(name in "\\PC{0,100}") {
            let label = sanitise_hostname(&name);
            prop_assert!((1..=63).contains(&label.len()));
            prop_assert!(label.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-'));
            prop_assert!(!label.starts_with('-') && !label.ends_with('-'));
            prop_assert_eq!(sanitise_hostname(&label), label.clone());
        }
    }
}
