//! Certificates an operator wants trusted, added to those of the image.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use wire::init::CA_BUNDLE_PATH;
use wire::signature::digest;

use crate::etc;

/// Where Debian's `update-ca-certificates` finds it again when it rebuilds the bundle.
const LOCAL_COPY: &str = "/usr/local/share/ca-certificates/agentenv.crt";
/// Bundles of distributions that keep theirs elsewhere; a start for ours when that does not exist.
const OTHER_BUNDLES: [&str; 3] = ["/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/ca-bundle.pem", "/etc/ssl/cert.pem"];
const BEGIN: &str = "-----BEGIN CERTIFICATE-----";
const END: &str = "-----END CERTIFICATE-----";

/// Refuses what is not a list of certificates.
pub(super) fn check(bundle: &str) -> Result<(), String> {
    if certificates(bundle).is_empty() { Err("caBundle has no certificate in PEM form".to_owned()) } else { Ok(()) }
}

/// Adds *bundle* to what the image trusts; *before* is what the last call gave back, and so does this one.
///
/// Nothing is read but the state of one file when nothing has changed since.
///
/// # Errors
/// Those of the file system.
pub(super) fn install(bundle: &str, before: Option<&str>) -> io::Result<String> {
    let system = Path::new(CA_BUNDLE_PATH);
    let state = |system: &Path| {
        let file = fs::metadata(system).ok();
        file.map(|m| format!("{}:{}:{}:{}:{}.{}", digest(bundle), m.dev(), m.ino(), m.len(), m.mtime(), m.mtime_nsec()))
    };
    if let (Some(before), Some(now)) = (before, state(system))
        && before == now
    {
        return Ok(now);
    }
    let mut old = etc::read(system)?;
    for other in OTHER_BUNDLES {
        if old.is_none() {
            old = etc::read(Path::new(other))?;
        }
    }
    etc::replace(system, &merged(&old.unwrap_or_default(), bundle), 0o644, true)?;
    etc::replace(Path::new(LOCAL_COPY), bundle, 0o644, true)?;
    Ok(state(system).unwrap_or_default())
}

/// *old* with the certificates of *bundle* that it does not have.
fn merged(old: &str, bundle: &str) -> String {
    let known: Vec<String> = certificates(old).iter().map(|c| body(c)).collect();
    let mut text = old.to_owned();
    let mut added: Vec<String> = Vec::new();
    for certificate in certificates(bundle) {
        let identity = body(certificate);
        if known.contains(&identity) || added.contains(&identity) {
            continue;
        }
        added.push(identity);
        if !text.is_empty() && !text.ends_with('\n') {
            text.push('\n');
        }
        text.push_str(certificate);
        text.push('\n');
    }
    text
}

fn certificates(pem: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut rest = pem;
    while let Some(start) = rest.find(BEGIN) {
        let Some(length) = rest[start..].find(END) else { break };
        let end = start + length + END.len();
        found.push(&rest[start..end]);
        rest = &rest[end..];
    }
    found
}

/// What identifies a certificate, however its lines are broken.
fn body(certificate: &str) -> String {
    certificate.split_whitespace().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn certificate(body: &str) -> String {
        format!("{BEGIN}\n{body}\n{END}")
    }

    #[test]
    fn certificates_are_added_once() {
        let old = format!("# Root\n{}", certificate("AAAA"));
        let bundle = format!("{}\n{}\n{}\n", certificate("BBBB"), certificate("AA\nAA"), certificate("BBBB"));
        let once = merged(&old, &bundle);
        assert_eq!(once, format!("{old}\n{}\n", certificate("BBBB")));
        assert_eq!(merged(&once, &bundle), once);
    }

    #[test]
    fn text_without_a_certificate_is_refused() {
        assert!(check("hello").is_err());
        assert!(check(BEGIN).is_err());
        assert!(check(&certificate("A")).is_ok());
    }
}
