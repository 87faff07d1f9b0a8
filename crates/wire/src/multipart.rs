//! `multipart/form-data`, parsed as it arrives.
//!
//! Browser-style quoting: in a file name `"` is `%22`, line breaks are `%0D` and `%0A`, and the rest is raw
//! UTF-8. The file name is handed on whole, because clients put the full target path there.

/// Bytes of the headers of one part; more is refused.
const MAX_HEADER_BYTES: usize = 16 << 10;
/// The longest boundary RFC 2046 allows.
const MAX_BOUNDARY_BYTES: usize = 70;

/// What the parser found, in the order of the body.
#[derive(Debug, PartialEq, Eq)]
pub enum Event {
    Part { name: String, filename: Option<String> },
    Data(Vec<u8>),
    PartEnd,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Before the first delimiter.
    Preamble,
    /// After a delimiter: `--` ends the body, a line break starts a part.
    AfterDelimiter,
    Headers,
    Content,
    Epilogue,
}

/// A push parser that keeps no more of a part than the length of a delimiter.
pub struct Parser {
    delimiter: Vec<u8>,
    buffer: Vec<u8>,
    state: State,
}

/// The boundary in a `Content-Type` header, if it is one of this kind.
pub fn boundary(content_type: &str) -> Option<String> {
    let (kind, parameters) = content_type.split_once(';')?;
    if !kind.trim().eq_ignore_ascii_case("multipart/form-data") {
        return None;
    }
    let (_, value) = header_parameters(parameters).into_iter().find(|(name, _)| name == "boundary")?;
    (!value.is_empty() && value.len() <= MAX_BOUNDARY_BYTES).then_some(value)
}

impl Parser {
    pub fn new(boundary: &str) -> Self {
        // The first delimiter may stand at the very start: a line break before the body makes it like the others.
        Self { delimiter: format!("\r\n--{boundary}").into_bytes(), buffer: b"\r\n".to_vec(), state: State::Preamble }
    }

    /// Takes the next bytes of the body and gives what is in them.
    ///
    /// # Errors
    /// A sentence about what is malformed.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<Vec<Event>, String> {
        self.buffer.extend_from_slice(bytes);
        let mut events = Vec::new();
        while self.step(&mut events)? {}
        Ok(events)
    }

    /// # Errors
    /// When the body ended before its closing delimiter.
    pub fn finish(&self) -> Result<(), String> {
        if self.state == State::Epilogue {
            Ok(())
        } else {
            Err("the multipart body ends before its last boundary".to_owned())
        }
    }

    /// One move of the parser; false when it needs more bytes.
    fn step(&mut self, events: &mut Vec<Event>) -> Result<bool, String> {
        match self.state {
            State::Preamble => Ok(self.skip_to_delimiter()),
            State::AfterDelimiter => self.after_delimiter(),
            State::Headers => self.headers(events),
            State::Content => Ok(self.content(events)),
            State::Epilogue => {
                self.buffer.clear();
                Ok(false)
            }
        }
    }

    fn skip_to_delimiter(&mut self) -> bool {
        if let Some(at) = find(&self.buffer, &self.delimiter) {
            self.buffer.drain(..at + self.delimiter.len());
            self.state = State::AfterDelimiter;
            return true;
        }
        let keep = self.buffer.len().min(self.delimiter.len() - 1);
        self.buffer.drain(..self.buffer.len() - keep);
        false
    }

    fn after_delimiter(&mut self) -> Result<bool, String> {
        // Blanks may stand between a delimiter and its line break.
        let blanks = self.buffer.iter().take_while(|b| matches!(b, b' ' | b'\t')).count();
        if blanks > MAX_HEADER_BYTES {
            return Err("malformed multipart boundary".to_owned());
        }
        match self.buffer.get(blanks..blanks + 2) {
            None => Ok(false),
            Some(b"--") if blanks == 0 => {
                self.state = State::Epilogue;
                Ok(true)
            }
            Some(b"\r\n") => {
                // The line break stays, so that a part without headers ends like one that has some.
                self.buffer.drain(..blanks);
                self.state = State::Headers;
                Ok(true)
            }
            Some(_) => Err("malformed multipart boundary".to_owned()),
        }
    }

    fn headers(&mut self, events: &mut Vec<Event>) -> Result<bool, String> {
        let Some(at) = find(&self.buffer, b"\r\n\r\n") else {
            if self.buffer.len() > MAX_HEADER_BYTES {
                return Err("the headers of a part are too long".to_owned());
            }
            return Ok(false);
        };
        let text = String::from_utf8(self.buffer[..at].to_vec())
            .map_err(|_| "the headers of a part are not UTF-8".to_owned())?;
        self.buffer.drain(..at + 4);
        events.push(disposition(&text)?);
        self.state = State::Content;
        Ok(true)
    }

    fn content(&mut self, events: &mut Vec<Event>) -> bool {
        if let Some(at) = find(&self.buffer, &self.delimiter) {
            if at > 0 {
                events.push(Event::Data(self.buffer[..at].to_vec()));
            }
            events.push(Event::PartEnd);
            self.buffer.drain(..at + self.delimiter.len());
            self.state = State::AfterDelimiter;
            return true;
        }
        let keep = self.buffer.len().min(self.delimiter.len() - 1);
        let ready = self.buffer.len() - keep;
        if ready > 0 {
            events.push(Event::Data(self.buffer.drain(..ready).collect()));
        }
        false
    }
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    let first = needle[0];
    let mut from = 0;
    while let Some(step) = haystack[from..].iter().position(|&b| b == first) {
        let at = from + step;
        if haystack.len() - at < needle.len() {
            return None;
        }
        if haystack[at..].starts_with(needle) {
            return Some(at);
        }
        from = at + 1;
    }
    None
}

fn disposition(headers: &str) -> Result<Event, String> {
    for line in headers.split("\r\n") {
        let Some((name, value)) = line.split_once(':') else { continue };
        if !name.trim().eq_ignore_ascii_case("content-disposition") {
            continue;
        }
        let parameters = value.split_once(';').map_or("", |(_, rest)| rest);
        let mut part = (None, None);
        for (key, text) in header_parameters(parameters) {
            match key.as_str() {
                "name" => part.0 = Some(text),
                "filename" => part.1 = Some(unescape(&text)),
                _ => {}
            }
        }
        let name = part.0.ok_or_else(|| "a part has no name".to_owned())?;
        return Ok(Event::Part { name, filename: part.1 });
    }
    Err("a part has no Content-Disposition".to_owned())
}

/// `; name=value; name="value"` as pairs. Quotes end only at a quote that is not escaped.
fn header_parameters(text: &str) -> Vec<(String, String)> {
    let mut pairs = Vec::new();
    let mut rest = text;
    while let Some((name, after)) = rest.split_once('=') {
        let name = name.trim_matches([';', ' ', '\t']).to_ascii_lowercase();
        let after = after.trim_start();
        let (value, remaining) = match after.strip_prefix('"') {
            Some(quoted) => read_quoted(quoted),
            None => after.split_once(';').map_or((after.trim().to_owned(), ""), |(v, r)| (v.trim().to_owned(), r)),
        };
        pairs.push((name, value));
        rest = remaining;
    }
    pairs
}

/// Up to the closing quote. A backslash escapes a quote only: Windows-style and odd names keep theirs.
fn read_quoted(text: &str) -> (String, &str) {
    let mut value = String::new();
    let mut characters = text.char_indices().peekable();
    while let Some((at, c)) = characters.next() {
        match c {
            '"' => return (value, &text[at + 1..]),
            '\\' if matches!(characters.peek(), Some((_, '"'))) => {
                value.push('"');
                characters.next();
            }
            c => value.push(c),
        }
    }
    (value, "")
}

/// Undoes only what browsers escape; any other `%` is part of the name.
fn unescape(name: &str) -> String {
    name.replace("%22", "\"").replace("%0D", "\r").replace("%0A", "\n")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn body(parts: &[(&str, &str, &[u8])], boundary: &str) -> Vec<u8> {
        let mut out = Vec::new();
        for (name, filename, content) in parts {
            out.extend_from_slice(format!("--{boundary}\r\nContent-Disposition: form-data; name=\"{name}\"; filename=\"{filename}\"\r\nContent-Type: text/plain\r\n\r\n").as_bytes());
            out.extend_from_slice(content);
            out.extend_from_slice(b"\r\n");
        }
        out.extend_from_slice(format!("--{boundary}--\r\n").as_bytes());
        out
    }

    /// Joins neighbouring data so that only the content counts, not how it was cut.
    fn parts(events: Vec<Event>) -> Vec<(String, Option<String>, Vec<u8>)> {
        let mut out: Vec<(String, Option<String>, Vec<u8>)> = Vec::new();
        for event in events {
            match event {
                Event::Part { name, filename } => out.push((name, filename, Vec::new())),
                Event::Data(data) => out.last_mut().unwrap().2.extend(data),
                Event::PartEnd => {}
            }
        }
        out
    }

    #[test]
    fn the_full_path_in_a_file_name_is_kept() {
        let mut parser = Parser::new("B");
        let events = parser.feed(&body(&[("file", "/home/user/a b/ü%22.txt", b"hi")], "B")).unwrap();
        assert_eq!(parts(events), [("file".into(), Some("/home/user/a b/ü\".txt".into()), b"hi".to_vec())]);
        parser.finish().unwrap();
    }

    #[test]
    fn a_part_with_no_content_and_a_preamble() {
        let mut parser = Parser::new("B");
        let mut text = b"ignored\r\n".to_vec();
        text.extend(body(&[("file", "a", b"")], "B"));
        assert_eq!(parts(parser.feed(&text).unwrap()), [("file".into(), Some("a".into()), vec![])]);
    }

    #[test]
    fn a_body_that_is_cut_off_or_malformed_is_an_error() {
        let whole = body(&[("file", "a", b"content")], "B");
        let mut parser = Parser::new("B");
        parser.feed(&whole[..whole.len() - 8]).unwrap();
        assert!(parser.finish().is_err());
        assert!(Parser::new("B").feed(b"--Bxx").is_err());
        assert!(Parser::new("B").feed(b"--B\r\nX: y\r\n\r\n").is_err());
        assert!(Parser::new("B").feed(&[b"--B\r\n".to_vec(), vec![b'x'; 20_000]].concat()).is_err());
    }

    #[test]
    fn boundaries_are_read_from_the_header() {
        assert_eq!(boundary("multipart/form-data; boundary=abc"), Some("abc".into()));
        assert_eq!(boundary("Multipart/Form-Data; charset=x; boundary=\"a;b\""), Some("a;b".into()));
        assert_eq!(boundary("multipart/mixed; boundary=abc"), None);
        assert_eq!(boundary("multipart/form-data"), None);
    }

    proptest! {
        #[test]
        fn content_survives_any_split(contents in prop::collection::vec(prop::collection::vec(prop::sample::select(&b"\r\n-Bx\0"[..]), 0..60), 1..4),
                                      cuts in prop::collection::vec(1usize..20, 1..20)) {
            let boundary = "BoundaryThatIsLong";
            let expected: Vec<_> = contents.iter().map(|c| ("file".to_owned(), Some("/x".to_owned()), c.clone())).collect();
            let text = body(&contents.iter().map(|c| ("file", "/x", &c[..])).collect::<Vec<_>>(), boundary);
            let mut parser = Parser::new(boundary);
            let (mut events, mut at, mut turn) = (Vec::new(), 0, 0);
            while at < text.len() {
                let next = (at + cuts[turn % cuts.len()]).min(text.len());
                events.extend(parser.feed(&text[at..next]).unwrap());
                (at, turn) = (next, turn + 1);
            }
            prop_assert!(parser.finish().is_ok());
            prop_assert_eq!(parts(events), expected);
        }

        #[test]
        fn no_bytes_make_it_panic(bytes in prop::collection::vec(prop::sample::select(&b"\r\n-Bx:;=\" Content-Disposition"[..]), 0..200)) {
            let _ = Parser::new("B").feed(&bytes);
        }
    }
}
