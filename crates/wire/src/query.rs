//! The query of a URL, form-decoded.

/// The decoded value of the first parameter called *name*.
pub fn value(query: &str, name: &str) -> Option<String> {
    query.split('&').find_map(|pair| {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        (decode(key) == name).then(|| decode(value))
    })
}

fn decode(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        rest = after;
        match (first, after) {
            (b'+', _) => bytes.push(b' '),
            (b'%', [high, low, after @ ..]) if high.is_ascii_hexdigit() && low.is_ascii_hexdigit() => {
                bytes.push(nibble(*high) << 4 | nibble(*low));
                rest = after;
            }
            (other, _) => bytes.push(other),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn nibble(digit: u8) -> u8 {
    match digit {
        b'0'..=b'9' => digit - b'0',
        _ => (digit | 0x20) - b'a' + 10,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_decoded() {
        let query = "path=%2Fhome%2Fa+b%20%C3%BC&username=&flag&p%61th=second&bad=%zz%4";
        assert_eq!(value(query, "path").as_deref(), Some("/home/a b ü"));
        assert_eq!(value(query, "username").as_deref(), Some(""));
        assert_eq!(value(query, "flag").as_deref(), Some(""));
        assert_eq!(value(query, "bad").as_deref(), Some("%zz%4"));
        assert_eq!(value(query, "none"), None);
    }
}
