//! What a registry says when it wants a token: `Bearer realm="…",service="…",scope="…"`.

use reqwest::Url;

/// How to get in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Challenge {
    Basic,
    Bearer { realm: Url, service: Option<String>, scope: Option<String> },
}

const MAX_BYTES: usize = 8192;

impl Challenge {
    /// The first challenge in a header that can be met.
    pub fn parse(header: &str) -> Option<Self> {
        let header = header.trim();
        if header.len() > MAX_BYTES {
            return None;
        }
        let (scheme, rest) = header.split_once(' ').unwrap_or((header, ""));
        if scheme.eq_ignore_ascii_case("basic") {
            return Some(Self::Basic);
        }
        if !scheme.eq_ignore_ascii_case("bearer") {
            return None;
        }
        let (mut realm, mut service, mut scope) = (None, None, None);
        for (name, value) in parameters(rest)? {
            match name.to_ascii_lowercase().as_str() {
                "realm" => realm = Some(value),
                "service" => service = Some(value),
                "scope" => scope = Some(value),
                _ => (),
            }
        }
        Some(Self::Bearer { realm: Url::parse(&realm?).ok()?, service, scope })
    }

    /// Where the token is, for whoever may pull *repository* at *registry*. A registry that is asked
    /// over TLS cannot send credentials to where they would be seen.
    pub fn token_url(&self, registry: &Url, repository: &str) -> Option<Url> {
        let Self::Bearer { realm, service, scope } = self else { return None };
        let safe = realm.scheme() == "https" || (realm.scheme() == "http" && registry.scheme() == "http");
        if !safe || !realm.username().is_empty() || realm.password().is_some() {
            return None;
        }
        let mut url = realm.clone();
        let pull = format!("repository:{repository}:pull");
        let mut query = url.query_pairs_mut();
        if let Some(service) = service {
            query.append_pair("service", service);
        }
        query.append_pair("scope", scope.as_deref().unwrap_or(&pull));
        drop(query);
        Some(url)
    }
}

/// `name=token` and `name="text"`, with commas between.
fn parameters(text: &str) -> Option<Vec<(String, String)>> {
    let mut found = Vec::new();
    let mut rest = text.trim();
    while !rest.is_empty() {
        let (name, behind) = rest.split_once('=')?;
        let behind = behind.trim_start();
        let (value, behind) = if let Some(quoted) = behind.strip_prefix('"') {
            quoted_text(quoted)?
        } else {
            let end = behind.find(',').unwrap_or(behind.len());
            (behind[..end].trim().to_owned(), &behind[end..])
        };
        found.push((name.trim().to_owned(), value));
        let behind = behind.trim_start();
        rest = match behind.strip_prefix(',') {
            Some(more) => more.trim_start(),
            None if behind.is_empty() => behind,
            None => return None,
        };
    }
    Some(found)
}

fn quoted_text(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut letters = text.char_indices();
    while let Some((at, letter)) = letters.next() {
        match letter {
            '"' => return Some((value, &text[at + 1..])),
            '\\' => value.push(letters.next()?.1),
            other => value.push(other),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn url(text: &str) -> Url {
        Url::parse(text).expect("an address")
    }

    #[test]
    fn a_scope_may_have_commas() {
        let header = r#"Bearer realm="https://auth/token",service="reg",scope="repository:a/b:pull,push""#;
        let challenge = Challenge::parse(header).expect("a challenge");
        let token = challenge.token_url(&url("https://reg"), "a/b").expect("a place");
        assert_eq!(token.as_str(), "https://auth/token?service=reg&scope=repository%3Aa%2Fb%3Apull%2Cpush");
    }

    #[test]
    fn without_a_scope_no_more_than_needed_is_asked_for() {
        let challenge = Challenge::parse("bearer realm = https://auth/t?x=1").expect("a challenge");
        let token = challenge.token_url(&url("https://reg"), "a").expect("a place");
        assert_eq!(token.as_str(), "https://auth/t?x=1&scope=repository%3Aa%3Apull");
    }

    #[test]
    fn credentials_that_came_over_tls_do_not_leave_it() {
        let challenge = Challenge::parse(r#"Bearer realm="http://auth/token""#).expect("a challenge");
        assert_eq!(challenge.token_url(&url("https://reg"), "a"), None);
        assert!(challenge.token_url(&url("http://reg"), "a").is_some());
        let file = Challenge::parse(r#"Bearer realm="file:///etc/passwd""#).expect("a challenge");
        assert_eq!(file.token_url(&url("http://reg"), "a"), None);
    }

    #[test]
    fn what_is_no_challenge_is_none() {
        for bad in
            ["", "Bearer", "Negotiate x", "Bearer realm", r#"Bearer realm="x"#, r#"Bearer realm="a"b"#, "Bearer x=y"]
        {
            assert_eq!(Challenge::parse(bad), None, "{bad:?}");
        }
        assert_eq!(Challenge::parse(r#"Basic realm="x""#), Some(Challenge::Basic));
    }
}
