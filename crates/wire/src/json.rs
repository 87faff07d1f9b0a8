//! The JSON mapping of proto3, where serde's own differs from it.
//!
//! `null` means the default value, 32-bit integers may come as strings, bytes are
//! base64 in either alphabet with or without padding, enums are names or numbers.

use base64::Engine as _;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use serde::de::{self, DeserializeOwned, Deserializer};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::RpcError;

const LENIENT: GeneralPurposeConfig =
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent);
const STANDARD: GeneralPurpose = GeneralPurpose::new(&alphabet::STANDARD, LENIENT);
const URL_SAFE: GeneralPurpose = GeneralPurpose::new(&alphabet::URL_SAFE, LENIENT);

/// Parses one message; unknown fields are ignored.
///
/// # Errors
/// `invalid_argument` with what is wrong and where.
pub fn parse<T: DeserializeOwned>(payload: &[u8]) -> Result<T, RpcError> {
    // The parser would take a list for the fields of a message in their order.
    if payload.trim_ascii_start().first() != Some(&b'{') {
        return Err(RpcError::invalid("the message is not a JSON object"));
    }
    serde_json::from_slice(payload)
        .map_err(|e| RpcError::invalid(format!("the message is not valid JSON for this call: {e}")))
}

/// Writes one message.
pub fn write<T: Serialize>(message: &T) -> Vec<u8> {
    // Only maps with keys that are not strings fail, and no message has one.
    serde_json::to_vec(message).unwrap_or_default()
}

/// Decodes base64 in any of the forms proto3 JSON allows.
pub fn decode_base64(text: &str) -> Option<Vec<u8>> {
    let engine = if text.contains(['-', '_']) { &URL_SAFE } else { &STANDARD };
    engine.decode(text).ok()
}

/// Appends *bytes* as standard base64 with padding.
pub fn append_base64(bytes: &[u8], out: &mut Vec<u8>) {
    let start = out.len();
    out.resize(start + bytes.len().div_ceil(3) * 4, 0);
    // The space is exactly what the encoding needs, so it cannot fail.
    let written = STANDARD.encode_slice(bytes, &mut out[start..]).unwrap_or(0);
    out.truncate(start + written);
}

/// For fields where `null` means the default value.
///
/// # Errors
/// Those of the type itself.
pub fn null_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(input: D) -> Result<T, D::Error> {
    Ok(Option::<T>::deserialize(input)?.unwrap_or_default())
}

fn to_u32<E: de::Error>(value: &Value) -> Result<u32, E> {
    let number = match value {
        Value::Number(number) => number.as_u64().or_else(|| {
            let float = number.as_f64()?;
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "checked in the same expression"
            )]
            (float.fract() == 0.0 && (0.0..=f64::from(u32::MAX)).contains(&float)).then_some(float as u64)
        }),
        Value::String(text) => text.parse().ok(),
        _ => None,
    };
    number.and_then(|n| u32::try_from(n).ok()).ok_or_else(|| E::custom("expected an unsigned 32-bit integer"))
}

/// An optional `uint32`, as number or string.
///
/// # Errors
/// Anything else than that.
pub fn optional_u32<'de, D: Deserializer<'de>>(input: D) -> Result<Option<u32>, D::Error> {
    match Option::<Value>::deserialize(input)? {
        None => Ok(None),
        Some(value) => to_u32(&value).map(Some),
    }
}

/// A `uint32` that is zero when absent.
///
/// # Errors
/// Anything that is not an unsigned 32-bit integer.
pub fn u32<'de, D: Deserializer<'de>>(input: D) -> Result<u32, D::Error> {
    Ok(optional_u32(input)?.unwrap_or(0))
}

/// Optional `bytes`.
///
/// # Errors
/// Text that is not base64.
pub fn optional_bytes<'de, D: Deserializer<'de>>(input: D) -> Result<Option<Vec<u8>>, D::Error> {
    match Option::<std::borrow::Cow<'de, str>>::deserialize(input)? {
        None => Ok(None),
        Some(text) => decode_base64(&text).map(Some).ok_or_else(|| de::Error::custom("expected base64")),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn base64_is_read_in_every_form_proto_json_allows() {
        for text in ["+/8=", "+/8", "-_8=", "-_8"] {
            assert_eq!(decode_base64(text), Some(vec![0xfb, 0xff]), "{text}");
        }
        assert_eq!(decode_base64("a"), None);
        assert_eq!(decode_base64("**"), None);
    }

    proptest! {
        #[test]
        fn base64_comes_back(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            let mut out = b"x".to_vec();
            append_base64(&bytes, &mut out);
            prop_assert_eq!(decode_base64(std::str::from_utf8(&out[1..]).unwrap()), Some(bytes));
        }
    }
}
