//! Who gets to see which credentials.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use super::super::credentials::Secret;
use super::server::Asked;
use super::*;

fn basic(password: &str) -> Credentials {
    Credentials::Basic { username: "user".into(), password: Secret::new(password.into()) }
}

fn oci(bench: &Bench, whole: &[u8]) -> LayerName {
    let name = new_name();
    let source = Source::Oci { registry: bench.server.address.clone(), repository: "team/image".into() };
    bench.remotes.add(&name, &described(source, whole, true)).unwrap();
    name
}

fn header<'a>(asked: &'a Asked, name: &str) -> Option<&'a str> {
    asked.headers.get(name).map(String::as_str)
}

/// A registry that wants tokens, gives them for `user:right`, and sends to *blobs* for the bytes. Each
/// token is good for so many requests.
fn registry(bench: &Bench, blobs: &Server, good_for: usize) -> Arc<AtomicUsize> {
    let granted = Arc::new(AtomicUsize::new(0));
    let (counted, used) = (Arc::clone(&granted), AtomicUsize::new(0));
    let (realm, blobs) = (format!("{}/token", bench.server.address), blobs.address.clone());
    bench.server.special(move |asked| {
        if asked.target.starts_with("/token?") {
            assert!(
                asked.target.contains("service=here")
                    && asked.target.contains("scope=repository%3Ateam%2Fimage%3Apull")
            );
            // user:right
            if header(asked, "authorization") != Some("Basic dXNlcjpyaWdodA==") {
                return Some((401, Vec::new(), Vec::new()));
            }
            let number = counted.fetch_add(1, SeqCst) + 1;
            used.store(0, SeqCst);
            return Some((200, Vec::new(), format!(r#"{{"token": "t{number}"}}"#).into_bytes()));
        }
        let current = format!("Bearer t{}", counted.load(SeqCst));
        if header(asked, "authorization") != Some(current.as_str()) || used.fetch_add(1, SeqCst) >= good_for {
            let challenge = format!(
                r#"WWW-Authenticate: Bearer realm="{realm}",service="here",scope="repository:team/image:pull""#
            );
            return Some((401, vec![challenge], Vec::new()));
        }
        Some((307, vec![format!("Location: {blobs}/blob?signed=1")], Vec::new()))
    });
    granted
}

#[test]
fn a_token_is_got_once_and_shown_to_the_registry_only() {
    let (bench, blobs) = (bench(LONG), Server::start().unwrap());
    let whole = content(6, 20);
    blobs.put("/blob", whole.clone());
    let granted = registry(&bench, &blobs, 1000);
    bench.remotes.set_credentials(&bench.server.address, "team", Some(basic("right"))).unwrap();
    let name = oci(&bench, &whole);
    assert_eq!(bench.read(&name, 0, whole.len()).unwrap(), whole);
    assert_eq!(granted.load(SeqCst), 1);
    assert!(blobs.asked().iter().all(|asked| header(asked, "authorization").is_none()));
    assert!(!bench.server.asked().iter().any(|asked| {
        asked.target.starts_with("/v2/")
            && header(asked, "authorization").is_some_and(|value| value.starts_with("Basic"))
    }));
}

#[test]
fn a_token_and_a_redirection_that_end_are_got_anew() {
    let (bench, blobs) = (bench(LONG), Server::start().unwrap());
    let whole = content(12, 21);
    blobs.put("/blob", whole.clone());
    let granted = registry(&bench, &blobs, 1);
    bench.remotes.set_credentials(&bench.server.address, "", Some(basic("right"))).unwrap();
    let name = oci(&bench, &whole);
    bench.read(&name, 0, 1).unwrap();
    bench.read(&name, whole.len() - 1, 1).unwrap();
    for block in [5, 9, 3] {
        blobs.next(Fault::Status(403));
        assert_eq!(bench.read(&name, block * BLOCK, 10).unwrap(), &whole[block * BLOCK..block * BLOCK + 10]);
    }
    assert!(granted.load(SeqCst) > 1);
}

#[test]
fn wrong_credentials_are_not_absence_and_right_ones_help_at_once() {
    let (bench, blobs) = (bench(LONG), Server::start().unwrap());
    let whole = content(2, 22);
    blobs.put("/blob", whole.clone());
    registry(&bench, &blobs, 1000);
    let name = oci(&bench, &whole);
    for wrong in [None, Some(basic("wrong"))] {
        bench.remotes.set_credentials(&bench.server.address, "team/image", wrong).unwrap();
        assert_eq!(kind(bench.read(&name, 0, 1)), Some(io::ErrorKind::PermissionDenied));
    }
    bench.remotes.set_credentials(&bench.server.address, "team/image", Some(basic("right"))).unwrap();
    assert_eq!(bench.read(&name, 0, whole.len()).unwrap(), whole);
}

#[test]
fn the_next_daemon_waits_for_credentials_and_has_none_on_disk() {
    let (mut bench, blobs) = (bench(LONG), Server::start().unwrap());
    let whole = content(2, 23);
    blobs.put("/blob", whole.clone());
    registry(&bench, &blobs, 1000);
    bench.remotes.set_credentials(&bench.server.address, "", Some(basic("right"))).unwrap();
    let name = oci(&bench, &whole);
    bench.reopen(false);
    let before = bench.asked();
    thread::scope(|scope| {
        let reading = scope.spawn(|| bench.read(&name, 0, whole.len()).unwrap());
        bench.server.wait_asked(before + 1);
        bench.remotes.set_credentials(&bench.server.address, "", Some(basic("right"))).unwrap();
        assert_eq!(reading.join().unwrap(), whole);
    });
    assert!(!holds(bench.directory.path(), b"right"));
}

fn holds(place: &std::path::Path, secret: &[u8]) -> bool {
    fs::read_dir(place).unwrap().flatten().any(|entry| match entry.file_type() {
        Ok(kind) if kind.is_dir() => holds(&entry.path(), secret),
        Ok(kind) if kind.is_file() => {
            fs::read(entry.path()).unwrap_or_default().windows(secret.len()).any(|part| part == secret)
        }
        _ => false,
    })
}

#[test]
fn a_file_server_gets_what_was_given_for_it() {
    let bench = bench(LONG);
    bench.remotes.set_credentials(&bench.server.address, "", Some(basic("right"))).unwrap();
    let name = bench.put(&content(1, 24), false);
    bench.read(&name, 0, 1).unwrap();
    assert!(bench.server.asked().iter().all(|asked| header(asked, "authorization") == Some("Basic dXNlcjpyaWdodA==")));
}

#[test]
fn an_object_store_gets_signatures_and_no_keys() {
    let bench = bench(LONG);
    let whole = content(1, 25);
    bench.server.put("/bucket/a/one%20two", whole.clone());
    let keys =
        Credentials::S3 { access_key: "AK".into(), secret_key: Secret::new("hidden".into()), session_token: None };
    bench.remotes.set_credentials(&bench.server.address, "bucket", Some(keys)).unwrap();
    let name = new_name();
    let source = Source::S3 {
        endpoint: bench.server.address.clone(),
        bucket: "bucket".into(),
        key: "a/one two".into(),
        region: "here-1".into(),
        addressing: super::super::source::Addressing::Path,
    };
    bench.remotes.add(&name, &described(source, &whole, false)).unwrap();
    assert_eq!(bench.read(&name, 0, whole.len()).unwrap(), whole);
    for asked in bench.server.asked() {
        assert!(asked.target.contains("X-Amz-Signature=") && asked.target.contains("AK%2F"), "{}", asked.target);
        assert!(!asked.target.contains("hidden") && header(&asked, "authorization").is_none());
    }
}

#[test]
fn being_sent_round_and_round_ends() {
    let bench = bench(SHORT);
    let here = bench.server.address.clone();
    bench.server.special(move |_| Some((302, vec![format!("Location: {here}/again")], Vec::new())));
    let name = bench.put(&content(1, 26), false);
    assert_eq!(kind(bench.read(&name, 0, 1)), Some(io::ErrorKind::TimedOut));
}
