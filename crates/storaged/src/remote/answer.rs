//! What an answer to a request for a range must be. Anything else is a failure, and which one is decided here.

use std::ops::Range;
use std::time::Duration;

use reqwest::header::{
    CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, ETAG, HeaderMap, HeaderName, RETRY_AFTER,
};

use super::failure::Failure;

const MAX_RETRY_AFTER_S: u64 = 30;
const MAX_VALIDATOR_BYTES: usize = 256;

/// What is on its way: from where asked on, and maybe not all of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Promise {
    pub length: u64,
    /// Names the content at this moment, if the server is sure.
    pub validator: Option<String>,
}

/// Reads status and headers of an answer to a request for *asked* of an object of *size* bytes.
pub(super) fn check(status: u16, headers: &HeaderMap, asked: &Range<u64>, size: u64) -> Result<Promise, Failure> {
    match status {
        206 => part(headers, asked, size),
        200 => Err(Failure::Corrupt("the server sends everything where a range was asked for".into())),
        416 => Err(Failure::Corrupt(format!("the server has no byte {} of {size}", asked.start))),
        404 | 410 => Err(Failure::Absent(format!("status {status}"))),
        401 | 403 | 407 => Err(Failure::Denied(format!("status {status}"))),
        _ => Err(Failure::Unreachable(format!("status {status}"))),
    }
}

fn part(headers: &HeaderMap, asked: &Range<u64>, size: u64) -> Result<Promise, Failure> {
    let corrupt = |what: String| Err(Failure::Corrupt(what));
    if text(headers, &CONTENT_ENCODING).is_some_and(|encoding| encoding != "identity") {
        return corrupt("the server sends encoded bytes".into());
    }
    if text(headers, &CONTENT_TYPE).is_some_and(|kind| kind.starts_with("multipart/byteranges")) {
        return corrupt("the server sends one range in several parts".into());
    }
    let said = text(headers, &CONTENT_RANGE).unwrap_or_default();
    let Some((range, total)) = content_range(said) else {
        return corrupt("the server does not say which range it sends".into());
    };
    if total.is_some_and(|total| total != size) {
        return corrupt(format!("the source has {} bytes, and not {size}", total.unwrap_or_default()));
    }
    if range.start != asked.start || range.end > asked.end {
        return corrupt(format!("the server sends {range:?} where {asked:?} was asked for"));
    }
    let length = range.end - range.start;
    if text(headers, &CONTENT_LENGTH).is_some_and(|said| said.parse() != Ok(length)) {
        return corrupt("the server contradicts itself about the length".into());
    }
    Ok(Promise { length, validator: validator(headers) })
}

/// The entity tag, unless it is weak: that one may stay while bytes change.
fn validator(headers: &HeaderMap) -> Option<String> {
    let tag = text(headers, &ETAG).filter(|tag| tag.starts_with('"') && tag.len() <= MAX_VALIDATOR_BYTES);
    tag.map(str::to_owned)
}

/// `bytes 0-9/100`, as a range without its end, and the whole if it is told.
fn content_range(text: &str) -> Option<(Range<u64>, Option<u64>)> {
    let (range, total) = text.strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let (first, last): (u64, u64) = (number(first)?, number(last)?);
    let end = last.checked_add(1).filter(|end| first < *end)?;
    let total = if total == "*" { None } else { Some(number(total)?) };
    total.is_none_or(|total| end <= total).then_some((first..end, total))
}

fn number(text: &str) -> Option<u64> {
    text.bytes().all(|c| c.is_ascii_digit()).then(|| text.parse().ok())?
}

/// When the server would like to be asked again.
pub(super) fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let seconds = number(text(headers, &RETRY_AFTER)?)?;
    Some(Duration::from_secs(seconds.min(MAX_RETRY_AFTER_S)))
}

pub(super) fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

#[cfg(test)]
mod tests {
    use reqwest::header::HeaderValue;

    use super::*;

    fn headers(pairs: &[(HeaderName, &'static str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (name.clone(), HeaderValue::from_static(value))).collect()
    }

    fn said(range: &'static str) -> Result<Promise, Failure> {
        check(206, &headers(&[(CONTENT_RANGE, range)]), &(100..200), 1000)
    }

    #[test]
    fn the_range_that_was_asked_for_or_the_front_of_it_is_an_answer() {
        assert_eq!(said("bytes 100-199/1000").map(|p| p.length), Ok(100));
        assert_eq!(said("bytes 100-149/*").map(|p| p.length), Ok(50));
    }

    #[test]
    fn any_other_range_or_size_is_none() {
        for bad in [
            "",
            "bytes 0-99/1000",
            "bytes 100-200/1000",
            "bytes 101-199/1000",
            "bytes 100-199/1001",
            "bytes 100-99/1000",
            "bytes 100-+199/1000",
            "bytes 18446744073709551615-18446744073709551615/*",
            "octets 100-199/1000",
            "bytes */1000",
        ] {
            assert!(matches!(said(bad), Err(Failure::Corrupt(_))), "{bad:?}");
        }
    }

    #[test]
    fn each_status_has_one_meaning() {
        let failure = |status| check(status, &HeaderMap::new(), &(0..1), 1).err();
        for status in [404, 410] {
            assert!(matches!(failure(status), Some(Failure::Absent(_))));
        }
        for status in [401, 403] {
            assert!(matches!(failure(status), Some(Failure::Denied(_))));
        }
        for status in [400, 408, 429, 500, 502, 503, 504] {
            assert!(matches!(failure(status), Some(Failure::Unreachable(_))));
        }
        for status in [200, 206, 416] {
            assert!(matches!(failure(status), Some(Failure::Corrupt(_))));
        }
    }

    #[test]
    fn encoded_parted_and_contradictory_answers_are_none() {
        for more in
            [(CONTENT_ENCODING, "gzip"), (CONTENT_TYPE, "multipart/byteranges; boundary=x"), (CONTENT_LENGTH, "99")]
        {
            let all = headers(&[(CONTENT_RANGE, "bytes 100-199/1000"), more.clone()]);
            assert!(matches!(check(206, &all, &(100..200), 1000), Err(Failure::Corrupt(_))), "{more:?}");
        }
    }

    #[test]
    fn a_weak_tag_says_nothing_about_bytes() {
        assert_eq!(validator(&headers(&[(ETAG, "\"a\"")])).as_deref(), Some("\"a\""));
        assert_eq!(validator(&headers(&[(ETAG, "W/\"a\"")])), None);
    }

    #[test]
    fn a_server_cannot_send_us_away_for_long() {
        assert_eq!(retry_after(&headers(&[(RETRY_AFTER, "100000")])), Some(Duration::from_secs(30)));
        assert_eq!(retry_after(&headers(&[(RETRY_AFTER, "soon")])), None);
    }
}
