//! The name of a layer, as its header spells it.

use std::fmt;
use std::str::FromStr;

use crate::error::{Corruption, Invalid, Result};

/// Sixteen bytes; as text, 36 characters in lower case.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Uuid([u8; 16]);

/// Bytes of the field in a header: the text and a NUL.
pub(crate) const FIELD: usize = TEXT + 1;
const TEXT: usize = 36;
const DASHES: [usize; 4] = [8, 13, 18, 23];

impl Uuid {
    /// What a layer is called that stands for no layer in particular.
    pub const NIL: Self = Self([0; 16]);

    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }

    /// Reads a field of a header; one that is empty names nothing.
    pub(crate) fn decode(field: &[u8; FIELD]) -> Result<Option<Self>> {
        let end = field.iter().position(|byte| *byte == 0).ok_or(Corruption::Uuid)?;
        if end == 0 {
            return Ok(None);
        }
        Ok(Some(parse(&field[..end]).ok_or(Corruption::Uuid)?))
    }

    pub(crate) fn encode(uuid: Option<Self>) -> [u8; FIELD] {
        let mut field = [0; FIELD];
        if let Some(uuid) = uuid {
            field[..TEXT].copy_from_slice(uuid.to_string().as_bytes());
        }
        field
    }
}

fn parse(text: &[u8]) -> Option<Uuid> {
    if text.len() != TEXT {
        return None;
    }
    let mut value: u128 = 0;
    for (at, byte) in text.iter().enumerate() {
        if DASHES.contains(&at) {
            if *byte != b'-' {
                return None;
            }
        } else {
            value = value << 4 | u128::from((*byte as char).to_digit(16)?);
        }
    }
    Some(Uuid(value.to_be_bytes()))
}

impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = u128::from_be_bytes(self.0);
        write!(
            f,
            "{:08x}-{:04x}-{:04x}-{:04x}-{:012x}",
            value >> 96,
            value >> 80 & 0xffff,
            value >> 64 & 0xffff,
            value >> 48 & 0xffff,
            value & 0xffff_ffff_ffff
        )
    }
}

impl fmt::Debug for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Uuid {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        parse(text.as_bytes()).ok_or_else(|| Invalid::Uuid(text.chars().take(64).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_comes_back_as_it_was_and_upper_case_is_read() {
        let text = "0a0b0c0d-1234-4abc-8def-00000000002a";
        assert_eq!(text.parse::<Uuid>().unwrap().to_string(), text);
        assert_eq!(text.to_uppercase().parse::<Uuid>().unwrap().to_string(), text);
    }

    #[test]
    fn what_is_not_a_uuid_is_refused() {
        for text in ["", "0a0b0c0d", "0a0b0c0d01234-4abc-8def-00000000002a", "0a0b0c0d-1234-4abc-8def-0000000000-a"] {
            assert!(text.parse::<Uuid>().is_err(), "{text}");
        }
        assert!(Uuid::decode(&[b'0'; FIELD]).is_err());
    }
}
