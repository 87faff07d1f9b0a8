//! Comparing secrets without telling by the time it takes how much was right.

use sha2::{Digest, Sha256};

/// Whether both are equal. Digests are compared, so neither content nor length shows.
pub fn matches(given: &[u8], expected: &[u8]) -> bool {
    let (given, expected) = (Sha256::digest(given), Sha256::digest(expected));
    let difference = given.iter().zip(expected.iter()).fold(0, |sum, (a, b)| sum | (a ^ b));
    std::hint::black_box(difference) == 0
}

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn only_the_same_secret_matches() {
        assert!(matches(b"secret", b"secret"));
        assert!(!matches(b"secret", b"secreT"));
        assert!(!matches(b"secret", b"secret "));
        assert!(!matches(b"", b"secret"));
    }
}
