//! Remote layers from servers that others wrote: Debian's registry with tokens, and an S3 server.
//!
//! `AENV_S3_SERVER` names the program of the latter (versitygw). What is missing is skipped, and printed.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD as BASE64URL;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use storaged::device::Kind;
use storaged::directory::Directory;
use storaged::error::{Code, Result};
use storaged::node::{Node, Service, Session};
use storaged::protocol::parse;

struct Host {
    service: Service,
    session: Session,
    directory: tempfile::TempDir,
}

impl Host {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let service = Service::new(Arc::new(Node::open(directory.path()).unwrap()));
        Self { service, session: Session::default(), directory }
    }

    fn call(&self, call: &str, arguments: Value) -> Result<Value> {
        let mut frame = arguments;
        frame["id"] = json!(1);
        frame["call"] = json!(call);
        self.service.call(&self.session, parse(frame.to_string().as_bytes()).unwrap().call?)
    }

    /// A layer file of three blocks and a bit, and the bytes that it shows.
    fn layer(&self) -> (Vec<u8>, Vec<u8>, Value) {
        let shown: Vec<u8> = (0..900_u32 << 10).map(|at| at.wrapping_mul(2_654_435_761).to_le_bytes()[2]).collect();
        let source = self.directory.path().join("source");
        std::fs::write(&source, &shown).unwrap();
        let made = self.call("import", json!({ "source": source, "size_bytes": shown.len() })).unwrap();
        let layer = &made["stack"]["layers"][0];
        let file = self.directory.path().join("layers").join(layer.as_str().unwrap());
        let described = self.call("describe_layer", json!({ "layer": layer })).unwrap();
        (std::fs::read(file).unwrap(), shown, described)
    }

    fn add(&self, source: &Value, described: &Value) -> Value {
        let layer = format!("{}.lsmt", &described["digest"].as_str().unwrap()[7..39]);
        let mut call = described.clone();
        call["layer"] = json!(layer);
        call["source"] = source.clone();
        self.call("add_remote_layer", call).unwrap();
        json!({ "owner": "a", "stack": { "layers": [layer], "size_bytes": 900 << 10 } })
    }

    fn shown(&self, path: &Value) -> Vec<u8> {
        let name = Path::new(path["path"].as_str().unwrap()).file_name().unwrap().to_str().unwrap();
        let node = self.service.node();
        let device = node.device(node.find(Kind::Memory, name).unwrap()).unwrap();
        let mut buf = vec![0; usize::try_from(device.size_bytes()).unwrap()];
        device.read(&mut buf, 0).unwrap();
        buf
    }
}

/// A program, until it is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Starts *command* and waits until *port* is served; nothing when the program is not installed.
fn start(mut command: Command, port: u16) -> Option<Running> {
    let Ok(child) = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn() else { return None };
    let mut running = Running(child);
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        assert!(running.0.try_wait().unwrap().is_none(), "{command:?} ended");
        std::thread::yield_now();
    }
    Some(running)
}

/// One request with a body, as a plain client does it; the status and the head of the answer.
fn send(port: u16, method: &str, target: &str, headers: &[String], body: &[u8]) -> (u16, String) {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let lines: String = headers.iter().map(|line| line.clone() + "\r\n").collect();
    let length = body.len();
    let head = format!(
        "{method} {target} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\nContent-Length: {length}\r\n{lines}\r\n"
    );
    stream.write_all(&[head.as_bytes(), body].concat()).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    let answer = String::from_utf8_lossy(&answer).into_owned();
    let status = answer.split(' ').nth(1).unwrap().parse().unwrap();
    (status, answer)
}

fn openssl(arguments: &[&str], input: &[u8]) -> Option<Vec<u8>> {
    let mut child = Command::new("openssl")
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    child.stdin.take()?.write_all(input).ok()?;
    let output = child.wait_with_output().ok()?;
    output.status.success().then_some(output.stdout)
}

/// Gives a token for any repository to `user:right`.
struct Realm {
    port: u16,
}

/// A key, and the certificate that the registry believes.
struct Signer {
    key: PathBuf,
    certificate: PathBuf,
}

impl Signer {
    fn new(directory: &Path) -> Option<Self> {
        let (key, certificate) = (directory.join("key.pem"), directory.join("certificate.pem"));
        let (key_text, certificate_text) = (key.to_str()?, certificate.to_str()?);
        let request = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=realm", "-days", "2"];
        openssl(&[&request[..], &["-keyout", key_text, "-out", certificate_text]].concat(), b"")?;
        Some(Self { key, certificate })
    }

    fn token(&self, actions: &[&str]) -> String {
        let certificate = std::fs::read_to_string(&self.certificate).unwrap();
        let chain: String = certificate.lines().filter(|line| !line.starts_with('-')).collect();
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
        let header = json!({ "typ": "JWT", "alg": "RS256", "x5c": [chain] });
        let claims = json!({
            "iss": "realm", "aud": "registry", "sub": "user", "nbf": now - 60, "iat": now, "exp": now + 600, "jti": "1",
            "access": [{ "type": "repository", "name": "team/image", "actions": actions }],
        });
        let signed = format!("{}.{}", BASE64URL.encode(header.to_string()), BASE64URL.encode(claims.to_string()));
        let key = self.key.to_str().unwrap();
        let signature = openssl(&["dgst", "-sha256", "-sign", key], signed.as_bytes()).unwrap();
        format!("{signed}.{}", BASE64URL.encode(signature))
    }
}

impl Realm {
    fn start(token: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        std::thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                let mut request = Vec::new();
                let mut byte = [0];
                while !request.ends_with(b"\r\n\r\n") && stream.read(&mut byte).is_ok_and(|read| read == 1) {
                    request.push(byte[0]);
                }
                let request = String::from_utf8_lossy(&request).to_lowercase();
                // user:right
                let known = request.contains("authorization: basic dxnlcjpyawdoda==");
                let (status, body) =
                    if known { (200, json!({ "token": token }).to_string()) } else { (401, String::new()) };
                let head =
                    format!("HTTP/1.1 {status} x\r\nConnection: close\r\nContent-Length: {}\r\n\r\n", body.len());
                let _ = stream.write_all((head + &body).as_bytes());
            }
        });
        Self { port }
    }
}

#[test]
fn a_layer_comes_from_a_registry_that_wants_tokens() {
    let (from, to) = (Host::new(), Host::new());
    let place = tempfile::tempdir().unwrap();
    let Some(signer) = Signer::new(place.path()) else {
        println!("SKIPPED: openssl is not installed");
        return;
    };
    let port = free_port();
    let realm = Realm::start(signer.token(&["pull"]));
    let configuration = json!({
        "version": 0.1,
        "storage": { "filesystem": { "rootdirectory": place.path().join("blobs") } },
        "http": { "addr": format!("127.0.0.1:{port}") },
        "auth": { "token": {
            "realm": format!("http://127.0.0.1:{}/token", realm.port), "service": "registry", "issuer": "realm",
            "rootcertbundle": signer.certificate,
        } },
    });
    let file = place.path().join("configuration.yml");
    std::fs::write(&file, configuration.to_string()).unwrap();
    let mut command = Command::new("docker-registry");
    command.arg("serve").arg(&file);
    let Some(_registry) = start(command, port) else {
        println!("SKIPPED: docker-registry is not installed");
        return;
    };
    let (blob, shown, described) = from.layer();
    let pusher = vec![format!("Authorization: Bearer {}", signer.token(&["pull", "push"]))];
    let (status, answer) = send(port, "POST", "/v2/team/image/blobs/uploads/", &pusher, b"");
    assert_eq!(status, 202);
    let location = answer.lines().find_map(|line| line.strip_prefix("Location: ")).unwrap().trim();
    let target = location.split_once(&format!(":{port}")).unwrap().1;
    let digest = described["digest"].as_str().unwrap();
    assert_eq!(digest, format!("sha256:{:x}", Sha256::digest(&blob)));
    let (status, _) = send(port, "PUT", &format!("{target}&digest={digest}"), &pusher, &blob);
    assert_eq!(status, 201);

    let registry = format!("http://127.0.0.1:{port}");
    let source = json!({ "kind": "oci", "registry": registry, "repository": "team/image" });
    let attach = to.add(&source, &described);
    assert_eq!(to.call("attach_memory", attach.clone()).err().map(|e| e.code), Some(Code::Unavailable));
    let credentials = json!({ "kind": "basic", "username": "user", "password": "right" });
    let given = json!({ "address": registry, "path": "team", "credentials": credentials });
    to.call("set_credentials", given).unwrap();
    let memory = to.call("attach_memory", attach).unwrap();
    assert_eq!(to.shown(&memory), shown);
}

#[test]
fn a_layer_comes_from_an_object_store() {
    let Some(program) = std::env::var_os("AENV_S3_SERVER") else {
        println!("SKIPPED: AENV_S3_SERVER names no S3 server");
        return;
    };
    let (from, to) = (Host::new(), Host::new());
    let place = tempfile::tempdir().unwrap();
    let port = free_port();
    let (blob, shown, described) = from.layer();
    // The server keeps objects as files.
    std::fs::create_dir_all(place.path().join("bucket/some layers")).unwrap();
    std::fs::write(place.path().join("bucket/some layers/one"), &blob).unwrap();
    let mut command = Command::new(program);
    command.args([
        "--access",
        "AK",
        "--secret",
        "right",
        "--region",
        "here-1",
        "--port",
        &format!("127.0.0.1:{port}"),
        "posix",
    ]);
    command.arg(place.path());
    let _store = start(command, port).expect("AENV_S3_SERVER names a program");

    let endpoint = format!("http://127.0.0.1:{port}");
    let object =
        |key: &str| json!({ "kind": "s3", "endpoint": endpoint, "bucket": "bucket", "key": key, "region": "here-1" });
    let credentials = |secret: &str| {
        let keys = json!({ "kind": "s3", "access_key": "AK", "secret_key": secret, "session_token": null });
        json!({ "address": endpoint, "path": "bucket", "credentials": keys })
    };
    let attach = to.add(&object("some layers/one"), &described);
    to.call("set_credentials", credentials("wrong")).unwrap();
    assert_eq!(to.call("attach_memory", attach.clone()).err().map(|e| e.code), Some(Code::Unavailable));
    to.call("set_credentials", credentials("right")).unwrap();
    let absent = to.add(&object("some layers/two"), &described);
    assert_eq!(to.call("attach_memory", absent).err().map(|e| e.code), Some(Code::NotFound));
    to.add(&object("some layers/one"), &described);
    let memory = to.call("attach_memory", attach).unwrap();
    assert_eq!(to.shown(&memory), shown);
}
