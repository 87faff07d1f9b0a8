//! What callers call things, checked once: a name of this module is safe as the name of a file.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

const MAX_OWNER_BYTES: usize = 128;
const ID_DIGITS: usize = 32;

/// Who has a disk or memory: one sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Owner(String);

/// One immutable file under `layers/`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct LayerName(String);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Blocks as they are.
    Lsmt,
    /// The same, compressed.
    Zfile,
}

/// Names a layer or an upper for ever: 128 random bits in lower case hex.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Id(u128);

impl Owner {
    /// # Errors
    /// `invalid` for what is not 1 to 128 of `A-Za-z0-9._-`, starting with a letter or digit.
    pub fn parse(text: &str) -> Result<Self> {
        let fine = |c: u8| c.is_ascii_alphanumeric() || matches!(c, b'.' | b'_' | b'-');
        let bytes = text.as_bytes();
        let starts_well = bytes.first().is_some_and(u8::is_ascii_alphanumeric);
        if starts_well && bytes.len() <= MAX_OWNER_BYTES && bytes.iter().all(|&c| fine(c)) {
            return Ok(Self(text.to_owned()));
        }
        Err(Error::invalid("an owner is 1 to 128 of A-Za-z0-9._- and starts with a letter or a digit"))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl LayerName {
    /// # Errors
    /// `invalid` for what is not 32 hex digits with `.lsmt` or `.zfile`.
    pub fn parse(text: &str) -> Result<Self> {
        match text.split_once('.') {
            Some((id, "lsmt" | "zfile")) if Id::parse(id).is_ok() => Ok(Self(text.to_owned())),
            _ => Err(Error::invalid("a layer is 32 hex digits with .lsmt or .zfile")),
        }
    }

    pub fn new(id: Id, format: Format) -> Self {
        let ending = match format {
            Format::Lsmt => "lsmt",
            Format::Zfile => "zfile",
        };
        Self(format!("{id}.{ending}"))
    }

    pub fn format(&self) -> Format {
        if self.0.ends_with("zfile") { Format::Zfile } else { Format::Lsmt }
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Id {
    /// # Errors
    /// When the kernel gives no random bytes.
    pub fn random() -> std::io::Result<Self> {
        let mut bytes = [0; 16];
        let mut filled = 0;
        while filled < bytes.len() {
            filled += rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty())?;
        }
        Ok(Self(u128::from_le_bytes(bytes)))
    }

    /// # Errors
    /// `invalid` for what is not 32 lower case hex digits.
    pub fn parse(text: &str) -> Result<Self> {
        let fine = |c: u8| c.is_ascii_digit() || (b'a'..=b'f').contains(&c);
        if text.len() == ID_DIGITS && text.bytes().all(fine) {
            if let Ok(number) = u128::from_str_radix(text, 16) {
                return Ok(Self(number));
            }
        }
        Err(Error::invalid("an id is 32 lower case hex digits"))
    }

    /// As the header of a layer has it: with the dashes of a UUID.
    pub fn uuid(self) -> String {
        let digits = self.to_string();
        [&digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..]].join("-")
    }
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for LayerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

macro_rules! as_string {
    ($name:ident) => {
        impl TryFrom<String> for $name {
            type Error = Error;

            fn try_from(text: String) -> Result<Self> {
                Self::parse(&text)
            }
        }

        impl From<$name> for String {
            fn from(name: $name) -> Self {
                name.to_string()
            }
        }
    };
}

as_string!(Owner);
as_string!(LayerName);
as_string!(Id);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_is_a_path_is_refused() {
        for bad in ["", ".", "..", ".a", "-a", "a/b", "a\0", "ä", "a b", &"a".repeat(129)] {
            assert!(Owner::parse(bad).is_err(), "{bad:?}");
        }
        assert!(Owner::parse("sb-1.x_Y").is_ok());
    }

    #[test]
    fn a_layer_has_an_id_and_one_of_two_endings() -> Result<()> {
        let id = Id::parse("0123456789abcdef0123456789abcdef")?;
        assert_eq!(id.uuid(), "01234567-89ab-cdef-0123-456789abcdef");
        assert_eq!(LayerName::new(id, Format::Zfile).format(), Format::Zfile);
        for bad in ["", "x.lsmt", "0123456789abcdef0123456789abcdef", "0123456789ABCDEF0123456789abcdef.lsmt"] {
            assert!(LayerName::parse(bad).is_err(), "{bad:?}");
        }
        assert!(LayerName::parse("+123456789abcdef0123456789abcdef.lsmt").is_err());
        Ok(())
    }
}
