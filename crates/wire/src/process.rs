//! Messages of `process.Process`.

use std::collections::BTreeMap;

use bytes::Bytes;
use serde::de::{self, Deserializer};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::frame::{self, Builder};
use crate::json;
use crate::{Code, RpcError};

#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct ProcessConfig {
    #[serde(deserialize_with = "json::null_default")]
    pub cmd: String,
    #[serde(deserialize_with = "json::null_default", skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
    #[serde(deserialize_with = "json::null_default", skip_serializing_if = "BTreeMap::is_empty")]
    pub envs: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
}

#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(default)]
pub struct Size {
    #[serde(deserialize_with = "json::u32")]
    pub cols: u32,
    #[serde(deserialize_with = "json::u32")]
    pub rows: u32,
}

#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(default)]
pub struct Pty {
    pub size: Option<Size>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct StartRequest {
    #[serde(deserialize_with = "json::null_default")]
    pub process: ProcessConfig,
    pub pty: Option<Pty>,
    pub tag: Option<String>,
    pub stdin: Option<bool>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct SelectorFields {
    #[serde(deserialize_with = "json::optional_u32")]
    pid: Option<u32>,
    tag: Option<String>,
}

/// Which process a call is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Selector {
    Pid(u32),
    Tag(String),
}

impl SelectorFields {
    /// # Errors
    /// `invalid_argument` unless exactly one of the two is given.
    pub fn selector(self) -> Result<Selector, RpcError> {
        match (self.pid, self.tag) {
            (Some(pid), None) => Ok(Selector::Pid(pid)),
            (None, Some(tag)) => Ok(Selector::Tag(tag)),
            (Some(_), Some(_)) => Err(RpcError::invalid("a process is selected by pid or by tag, not by both")),
            (None, None) => Err(RpcError::invalid("no process is selected: give its pid or its tag")),
        }
    }
}

/// `ConnectRequest` and `CloseStdinRequest`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct SelectRequest {
    #[serde(deserialize_with = "json::null_default")]
    pub process: SelectorFields,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct InputFields {
    #[serde(deserialize_with = "json::optional_bytes")]
    stdin: Option<Vec<u8>>,
    #[serde(deserialize_with = "json::optional_bytes")]
    pty: Option<Vec<u8>>,
}

/// Bytes for a process, and which of its inputs they are meant for.
#[derive(Debug, PartialEq, Eq)]
pub enum Input {
    Stdin(Vec<u8>),
    Pty(Vec<u8>),
}

impl InputFields {
    /// # Errors
    /// `invalid_argument` unless exactly one of the two is given.
    pub fn input(self) -> Result<Input, RpcError> {
        match (self.stdin, self.pty) {
            (Some(bytes), None) => Ok(Input::Stdin(bytes)),
            (None, Some(bytes)) => Ok(Input::Pty(bytes)),
            _ => Err(RpcError::invalid("exactly one of stdin and pty must be given")),
        }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct SendInputRequest {
    #[serde(deserialize_with = "json::null_default")]
    pub process: SelectorFields,
    #[serde(deserialize_with = "json::null_default")]
    pub input: InputFields,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct DataEvent {
    #[serde(deserialize_with = "json::null_default")]
    pub input: InputFields,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct StreamInputFields {
    start: Option<SelectRequest>,
    data: Option<DataEvent>,
    keepalive: Option<de::IgnoredAny>,
}

/// One message of a `StreamInput` call.
#[derive(Debug, PartialEq, Eq)]
pub enum StreamInput {
    Start(Selector),
    Data(Input),
    Keepalive,
}

impl StreamInputFields {
    /// # Errors
    /// `invalid_argument` unless exactly one event is given.
    pub fn event(self) -> Result<StreamInput, RpcError> {
        match (self.start, self.data, self.keepalive) {
            (Some(start), None, None) => start.process.selector().map(StreamInput::Start),
            (None, Some(data), None) => data.input.input().map(StreamInput::Data),
            (None, None, Some(_)) => Ok(StreamInput::Keepalive),
            _ => Err(RpcError::invalid("exactly one of start, data and keepalive must be given")),
        }
    }
}

/// The signals a client may send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signal {
    Term,
    Kill,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct SendSignalRequest {
    #[serde(deserialize_with = "json::null_default")]
    pub process: SelectorFields,
    #[serde(deserialize_with = "signal_number")]
    signal: i64,
    /// Ours: also everything the process ever started, in whatever session it is now.
    #[serde(deserialize_with = "json::null_default")]
    pub tree: bool,
}

impl SendSignalRequest {
    /// # Errors
    /// `unimplemented` for signals that are not in the protocol.
    pub fn signal(&self) -> Result<Signal, RpcError> {
        match self.signal {
            15 => Ok(Signal::Term),
            9 => Ok(Signal::Kill),
            other => Err(RpcError::new(
                Code::Unimplemented,
                format!("signal {other} cannot be sent: use SIGNAL_SIGTERM or SIGNAL_SIGKILL"),
            )),
        }
    }
}

fn signal_number<'de, D: Deserializer<'de>>(input: D) -> Result<i64, D::Error> {
    match Value::deserialize(input)? {
        Value::Null => Ok(0),
        Value::Number(number) => number.as_i64().ok_or_else(|| de::Error::custom("expected the number of a signal")),
        Value::String(name) => match name.as_str() {
            "SIGNAL_UNSPECIFIED" => Ok(0),
            "SIGNAL_SIGTERM" => Ok(15),
            "SIGNAL_SIGKILL" => Ok(9),
            _ => Err(de::Error::custom(format!("{name} is not the name of a signal"))),
        },
        _ => Err(de::Error::custom("expected a signal")),
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct UpdateRequest {
    #[serde(deserialize_with = "json::null_default")]
    pub process: SelectorFields,
    pub pty: Option<Pty>,
}

#[derive(Debug, Serialize)]
pub struct ProcessInfo<'a> {
    pub config: &'a ProcessConfig,
    pub pid: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tag: Option<&'a str>,
}

#[derive(Debug, Serialize)]
pub struct ListResponse<'a> {
    pub processes: Vec<ProcessInfo<'a>>,
}

/// Which output some bytes came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Output {
    Stdout,
    Stderr,
    Pty,
}

/// How a process ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ended {
    /// Exit code, -1 when a signal ended it.
    pub exit_code: i32,
    pub exited: bool,
    pub status: String,
    pub error: Option<String>,
}

pub fn start_frame(pid: u32) -> Bytes {
    frame::message(format!("{{\"event\":{{\"start\":{{\"pid\":{pid}}}}}}}").as_bytes())
}

pub fn keepalive_frame() -> Bytes {
    frame::message(b"{\"event\":{\"keepalive\":{}}}")
}

/// One frame of output; written without an intermediate copy.
pub fn data_frame(output: Output, bytes: &[u8]) -> Bytes {
    let name: &[u8] = match output {
        Output::Stdout => b"stdout",
        Output::Stderr => b"stderr",
        Output::Pty => b"pty",
    };
    let mut builder = Builder::with_capacity(40 + bytes.len().div_ceil(3) * 4);
    let payload = builder.payload();
    payload.extend_from_slice(b"{\"event\":{\"data\":{\"");
    payload.extend_from_slice(name);
    payload.extend_from_slice(b"\":\"");
    json::append_base64(bytes, payload);
    payload.extend_from_slice(b"\"}}}");
    builder.finish()
}

pub fn end_event_frame(ended: &Ended) -> Bytes {
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct End<'a> {
        exit_code: i32,
        exited: bool,
        status: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        error: Option<&'a str>,
    }
    #[derive(Serialize)]
    struct Event<'a> {
        end: End<'a>,
    }
    #[derive(Serialize)]
    struct Message<'a> {
        event: Event<'a>,
    }
    let end =
        End { exit_code: ended.exit_code, exited: ended.exited, status: &ended.status, error: ended.error.as_deref() };
    frame::message(&json::write(&Message { event: Event { end } }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::json::parse;

    #[test]
    fn a_command_of_the_sdk_is_understood() {
        let request: StartRequest = parse(
            br#"{"process":{"cmd":"/bin/bash","args":["-l","-c","true"],"envs":{"A":"b"},"cwd":"/tmp"},"stdin":false,"new":[1]}"#,
        )
        .unwrap();
        assert_eq!(request.process.args, ["-l", "-c", "true"]);
        assert_eq!(request.process.cwd.as_deref(), Some("/tmp"));
        assert_eq!(request.stdin, Some(false));
        assert!(request.pty.is_none());
    }

    #[test]
    fn null_means_absent() {
        let request: StartRequest =
            parse(br#"{"process":{"cmd":"a","args":null,"envs":null,"cwd":null},"pty":null,"tag":null}"#).unwrap();
        assert!(request.process.args.is_empty() && request.tag.is_none());
    }

    #[test]
    fn a_pid_may_be_a_number_or_a_string_but_not_negative() {
        for good in ["7", "\"7\"", "7.0"] {
            let request: SelectRequest = parse(format!(r#"{{"process":{{"pid":{good}}}}}"#).as_bytes()).unwrap();
            assert_eq!(request.process.selector().unwrap(), Selector::Pid(7));
        }
        for bad in ["-1", "1.5", "4294967296", "true", "\"x\""] {
            let failed = parse::<SelectRequest>(format!(r#"{{"process":{{"pid":{bad}}}}}"#).as_bytes()).unwrap_err();
            assert_eq!(failed.code, Code::InvalidArgument, "{bad}");
        }
    }

    #[test]
    fn exactly_one_selector_and_one_input_are_needed() {
        let both: SelectRequest = parse(br#"{"process":{"pid":1,"tag":"a"}}"#).unwrap();
        assert!(both.process.selector().is_err());
        let none: SelectRequest = parse(b"{}").unwrap();
        assert!(none.process.selector().is_err());
        let input: SendInputRequest = parse(br#"{"process":{"tag":"a"},"input":{"stdin":"aGk="}}"#).unwrap();
        assert_eq!(input.input.input().unwrap(), Input::Stdin(b"hi".to_vec()));
        let empty: SendInputRequest = parse(br#"{"process":{"tag":"a"},"input":{}}"#).unwrap();
        assert!(empty.input.input().is_err());
    }

    #[test]
    fn signals_are_names_or_numbers() {
        for (text, expected) in
            [("\"SIGNAL_SIGKILL\"", Some(Signal::Kill)), ("15", Some(Signal::Term)), ("2", None), ("null", None)]
        {
            let request: SendSignalRequest = parse(format!("{{\"signal\":{text}}}").as_bytes()).unwrap();
            assert_eq!(request.signal().ok(), expected, "{text}");
        }
        assert!(parse::<SendSignalRequest>(br#"{"signal":"SIGHUP"}"#).is_err());
    }

    #[test]
    fn stream_input_has_three_kinds_of_message() {
        let start: StreamInputFields = parse(br#"{"start":{"process":{"pid":7}}}"#).unwrap();
        assert_eq!(start.event().unwrap(), StreamInput::Start(Selector::Pid(7)));
        let data: StreamInputFields = parse(br#"{"data":{"input":{"pty":"aGk="}}}"#).unwrap();
        assert_eq!(data.event().unwrap(), StreamInput::Data(Input::Pty(b"hi".to_vec())));
        let alive: StreamInputFields = parse(br#"{"keepalive":{}}"#).unwrap();
        assert_eq!(alive.event().unwrap(), StreamInput::Keepalive);
        assert!(parse::<StreamInputFields>(b"{}").unwrap().event().is_err());
    }

    #[test]
    fn events_are_written_as_the_clients_read_them() {
        assert_eq!(&start_frame(7)[5..], br#"{"event":{"start":{"pid":7}}}"#);
        assert_eq!(&data_frame(Output::Stdout, b"hi\n")[5..], br#"{"event":{"data":{"stdout":"aGkK"}}}"#);
        assert_eq!(&keepalive_frame()[5..], br#"{"event":{"keepalive":{}}}"#);
        let ended =
            Ended { exit_code: 3, exited: true, status: "exit status 3".into(), error: Some("exit status 3".into()) };
        assert_eq!(
            &end_event_frame(&ended)[5..],
            br#"{"event":{"end":{"exitCode":3,"exited":true,"status":"exit status 3","error":"exit status 3"}}}"#
        );
    }

    proptest! {
        #[test]
        fn output_comes_back_from_its_frame(bytes in prop::collection::vec(any::<u8>(), 0..500)) {
            let framed = data_frame(Output::Stderr, &bytes);
            let message: Value = serde_json::from_slice(&framed[5..]).unwrap();
            let text = message["event"]["data"]["stderr"].as_str().unwrap();
            prop_assert_eq!(json::decode_base64(text), Some(bytes));
        }

        #[test]
        fn no_text_makes_a_request_panic(text in "\\PC{0,80}") {
            let _ = parse::<StartRequest>(text.as_bytes());
            let _ = parse::<SendSignalRequest>(text.as_bytes());
        }
    }
}
