//! Where a remote layer lies, checked once: what is kept on disk of it names no secret.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use reqwest::Url;
use serde::{Deserialize, Serialize};

use super::BLOCK_BYTES;
use crate::error::{Error, Result};
use crate::layer::MAX_SIZE_BYTES;

/// Of one SHA-256.
pub(super) const SUM_BYTES: usize = 32;
const MAX_TEXT_BYTES: usize = 2048;

/// A place that answers requests for ranges of bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Source {
    /// A file of a server that knows ranges.
    Http { url: String },
    /// A blob of a registry, by the digest of the layer. *registry* is its address, as `https://host:5000`.
    Oci { registry: String, repository: String },
    /// An object of a store that speaks S3. *endpoint* is without the bucket.
    S3 {
        endpoint: String,
        bucket: String,
        key: String,
        region: String,
        #[serde(default)]
        addressing: Addressing,
    },
}

/// Where the bucket is named.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Addressing {
    #[default]
    Path,
    Virtual,
}

/// A remote layer, as it is kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Remote {
    pub source: Source,
    pub size_bytes: u64,
    /// Of the whole file.
    pub digest: Digest,
    /// Of each block of 256 KiB, one after the other. Without them wrong bytes of an uncompressed layer
    /// show only when all of it is there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block_sums: Option<Sums>,
}

/// `sha256:` and 64 lower case hex digits.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest(pub [u8; SUM_BYTES]);

/// SHA-256 of blocks, joined; base64 in text.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Sums(Vec<u8>);

impl Remote {
    /// # Errors
    /// `invalid` for what cannot be a remote layer.
    pub fn check(&self) -> Result<()> {
        self.source.check()?;
        if !(4096..=MAX_SIZE_BYTES).contains(&self.size_bytes) {
            return Err(Error::invalid(format!("a remote layer of {} bytes", self.size_bytes)));
        }
        let blocks = self.size_bytes.div_ceil(BLOCK_BYTES);
        if self.block_sums.as_ref().is_some_and(|sums| sums.count() as u64 != blocks) {
            return Err(Error::invalid(format!("{blocks} blocks have as many sums")));
        }
        Ok(())
    }
}

impl Source {
    /// What requests go to, parsed: scheme and address at least.
    ///
    /// # Errors
    /// `invalid` for an address that is none, that names a secret, or for names that are paths.
    pub fn check(&self) -> Result<Url> {
        match self {
            Self::Http { url } => address(url),
            Self::Oci { registry, repository } => {
                let url = origin(registry)?;
                let fine = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || b"._-".contains(&c);
                let parts_fine = |part: &str| part.bytes().all(fine) && part.bytes().any(|c| c.is_ascii_alphanumeric());
                if repository.len() > 255 || !repository.split('/').all(parts_fine) {
                    return Err(Error::invalid("that is not the name of a repository"));
                }
                Ok(url)
            }
            Self::S3 { endpoint, bucket, key, region, .. } => {
                let url = origin(endpoint)?;
                let word = |text: &str| {
                    let fine = |c: u8| c.is_ascii_alphanumeric() || b"._-".contains(&c);
                    (1..=255).contains(&text.len()) && text.bytes().all(fine) && !text.starts_with('.')
                };
                if !word(bucket) || !word(region) {
                    return Err(Error::invalid("that is not the name of a bucket or of a region"));
                }
                let relative = key.split('/').any(|part| part == "." || part == "..");
                if key.is_empty() || key.len() > 1024 || relative || key.chars().any(char::is_control) {
                    return Err(Error::invalid("that is not the key of an object"));
                }
                Ok(url)
            }
        }
    }
}

/// An address without anything that could be a secret: it is kept on disk and shown in messages.
fn address(text: &str) -> Result<Url> {
    let url = Url::parse(text).ok().filter(|_| text.len() <= MAX_TEXT_BYTES);
    let url = url.ok_or_else(|| Error::invalid("a source has an address"))?;
    if !matches!(url.scheme(), "http" | "https") || url.host_str().is_none_or(str::is_empty) {
        return Err(Error::invalid("the address of a source starts with http:// or https://"));
    }
    if !url.username().is_empty() || url.password().is_some() || url.query().is_some() || url.fragment().is_some() {
        return Err(Error::invalid("an address has no user, query or fragment: credentials are given apart"));
    }
    Ok(url)
}

/// An address of a host and nothing on it.
///
/// # Errors
/// `invalid` for anything else.
pub(super) fn origin(text: &str) -> Result<Url> {
    let url = address(text)?;
    if url.path() != "/" {
        return Err(Error::invalid("the address of a registry or a store has no path"));
    }
    Ok(url)
}

impl Digest {
    pub fn hex(self) -> String {
        self.0.iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}"))
    }
}

impl std::fmt::Display for Digest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "sha256:{}", self.hex())
    }
}

impl std::fmt::Debug for Digest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{self}")
    }
}

impl TryFrom<String> for Digest {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        let wrong = || Error::invalid("a digest is sha256: and 64 lower case hex digits");
        let digits = text.strip_prefix("sha256:").filter(|digits| digits.len() == 2 * SUM_BYTES).ok_or_else(wrong)?;
        let fine = |c: u8| c.is_ascii_digit() || (b'a'..=b'f').contains(&c);
        if !digits.bytes().all(fine) {
            return Err(wrong());
        }
        let mut bytes = [0; SUM_BYTES];
        for (at, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&digits[2 * at..2 * at + 2], 16).map_err(|_| wrong())?;
        }
        Ok(Self(bytes))
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.to_string()
    }
}

impl Sums {
    pub fn new(bytes: Vec<u8>) -> Self {
        Self(bytes)
    }

    pub fn count(&self) -> usize {
        self.0.len() / SUM_BYTES
    }

    pub fn of(&self, block: u64) -> Option<&[u8]> {
        let at = usize::try_from(block).ok()?.checked_mul(SUM_BYTES)?;
        self.0.get(at..at.checked_add(SUM_BYTES)?)
    }
}

impl std::fmt::Debug for Sums {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} sums", self.count())
    }
}

impl TryFrom<String> for Sums {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        let bytes = BASE64.decode(text).ok().filter(|bytes| bytes.len() % SUM_BYTES == 0);
        bytes.map(Self).ok_or_else(|| Error::invalid("sums of blocks are 32 bytes each, in base64"))
    }
}

impl From<Sums> for String {
    fn from(sums: Sums) -> Self {
        BASE64.encode(sums.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn http(url: &str) -> Source {
        Source::Http { url: url.into() }
    }

    #[test]
    fn an_address_that_names_a_secret_or_is_none_is_refused() {
        for bad in [
            "",
            "layer",
            "file:///etc/passwd",
            "http://",
            "https://user@host/x",
            "https://u:p@host/x",
            "https://host/x?signature=1",
            "https://host/x#y",
        ] {
            assert!(http(bad).check().is_err(), "{bad:?}");
        }
        assert!(http("https://host:8443/a/b.lsmt").check().is_ok());
    }

    #[test]
    fn names_that_are_paths_are_refused() {
        let oci = |repository: &str| Source::Oci { registry: "https://host".into(), repository: repository.into() };
        for bad in ["", "a//b", "../x", "a/../b", "A", "a b", "/a", "a/"] {
            assert!(oci(bad).check().is_err(), "{bad:?}");
        }
        assert!(oci("library/alpine").check().is_ok());
        let s3 = |bucket: &str, key: &str| Source::S3 {
            endpoint: "http://host:9000".into(),
            bucket: bucket.into(),
            key: key.into(),
            region: "us-east-1".into(),
            addressing: Addressing::Path,
        };
        for (bucket, key) in [("", "k"), ("a/b", "k"), ("..", "k"), ("b", ""), ("b", "a/../c"), ("b", "a\n")] {
            assert!(s3(bucket, key).check().is_err(), "{bucket:?} {key:?}");
        }
        assert!(s3("bucket", "layers/one two").check().is_ok());
    }

    #[test]
    fn a_digest_has_one_spelling() {
        let good = format!("sha256:{}", "0a".repeat(32));
        assert_eq!(Digest::try_from(good.clone()).map(String::from).ok(), Some(good.clone()));
        for bad in
            ["", "sha256:", &good.to_uppercase(), &good[..70], &good.replace("sha256", "sha512"), &format!("{good}0")]
        {
            assert!(Digest::try_from(bad.to_owned()).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn there_are_as_many_sums_as_blocks() {
        let remote = |size_bytes, sums: usize| Remote {
            source: http("http://host/x"),
            size_bytes,
            digest: Digest([0; 32]),
            block_sums: Some(Sums(vec![0; sums * SUM_BYTES])),
        };
        assert!(remote(BLOCK_BYTES + 1, 2).check().is_ok());
        for (size, sums) in [(BLOCK_BYTES + 1, 1), (BLOCK_BYTES, 2), (0, 0), (u64::MAX, 0)] {
            assert!(remote(size, sums).check().is_err(), "{size}");
        }
    }
}
