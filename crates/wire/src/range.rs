//! The `Range` header of a download.

/// What part of a file is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Range {
    /// No range, or a form that is answered with the whole file, as HTTP allows.
    Whole,
    /// First byte and number of bytes, at least one.
    Part {
        start: u64,
        length: u64,
    },
    Unsatisfiable,
}

/// Reads a `Range` header for a file of *size* bytes. Several ranges at once are answered as a whole.
pub fn parse(header: Option<&str>, size: u64) -> Range {
    let Some(spec) = header.and_then(|h| h.trim().strip_prefix("bytes=")) else { return Range::Whole };
    let Some((first, last)) = spec.split_once('-') else { return Range::Whole };
    let (first, last) = (first.trim(), last.trim());
    let all_digits = |text: &str| text.bytes().all(|b| b.is_ascii_digit());
    if !all_digits(first) || !all_digits(last) {
        return Range::Whole;
    }
    // A number too long for 64 bits is beyond the end of any file.
    let number = |text: &str| text.parse::<u64>().unwrap_or(u64::MAX);
    match (first.is_empty(), last.is_empty()) {
        (true, true) => Range::Whole,
        (true, false) => match number(last).min(size) {
            0 => Range::Unsatisfiable,
            length => Range::Part { start: size - length, length },
        },
        (false, _) => {
            let start = number(first);
            let end = if last.is_empty() { u64::MAX } else { number(last) };
            if end < start {
                Range::Whole
            } else if start >= size {
                Range::Unsatisfiable
            } else {
                Range::Part { start, length: end.min(size - 1) - start + 1 }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_forms_of_rfc_9110() {
        let part = |start, length| Range::Part { start, length };
        for (header, expected) in [
            ("bytes=0-0", part(0, 1)),
            ("bytes=2-", part(2, 8)),
            ("bytes=-3", part(7, 3)),
            ("bytes=-30", part(0, 10)),
            ("bytes=5-99999999999999999999999", part(5, 5)),
            ("bytes=10-", Range::Unsatisfiable),
            ("bytes=-0", Range::Unsatisfiable),
            ("bytes=0-1,4-5", Range::Whole),
            ("bytes=4-2", Range::Whole),
            ("lines=1-2", Range::Whole),
            ("bytes=-", Range::Whole),
            ("bytes=a-b", Range::Whole),
        ] {
            assert_eq!(parse(Some(header), 10), expected, "{header}");
        }
        assert_eq!(parse(None, 10), Range::Whole);
        assert_eq!(parse(Some("bytes=0-"), 0), Range::Unsatisfiable);
    }

    proptest! {
        #[test]
        fn a_part_lies_within_the_file(header in "bytes=[0-9]{0,21}-[0-9]{0,21}", size in any::<u64>()) {
            if let Range::Part { start, length } = parse(Some(&header), size) {
                prop_assert!(length > 0 && start < size && length <= size - start);
            }
        }
    }
}
