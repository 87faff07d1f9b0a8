//! Layers, and images of them, that lie elsewhere.

use super::*;
use crate::device::{Device, Kind};
use crate::directory::Directory;
use crate::node::{Node, Service, Session};
use crate::protocol::parse;

struct Host {
    service: Service,
    session: Session,
    directory: tempfile::TempDir,
}

fn host() -> Host {
    let directory = tempfile::tempdir().unwrap();
    let options = Options { patience: Duration::from_secs(9), ..Options::default() };
    let node = Arc::new(Node::open_with(directory.path(), options).unwrap());
    Host { service: Service::new(node), session: Session::default(), directory }
}

impl Host {
    fn call(&self, call: &str, arguments: Value) -> Result<Value> {
        let mut frame = arguments;
        frame["id"] = json!(1);
        frame["call"] = json!(call);
        self.service.call(&self.session, parse(frame.to_string().as_bytes()).unwrap().call?)
    }

    fn imported(&self, content: &[u8]) -> Value {
        let source = self.directory.path().join("source");
        fs::write(&source, content).unwrap();
        let size_bytes = content.len().next_multiple_of(4096);
        self.call("import", json!({ "source": source, "size_bytes": size_bytes })).unwrap()["stack"].take()
    }

    fn file(&self, layer: &str) -> Vec<u8> {
        fs::read(self.directory.path().join("layers").join(layer)).unwrap()
    }

    fn device(&self, kind: Kind, path: &Value) -> Arc<dyn Device> {
        let name = std::path::Path::new(path["path"].as_str().unwrap()).file_name().unwrap().to_str().unwrap();
        let node = self.service.node();
        node.device(node.find(kind, name).unwrap()).unwrap()
    }
}

fn bytes(device: &dyn Device) -> io::Result<Vec<u8>> {
    let mut buf = vec![0xee; usize::try_from(device.size_bytes()).unwrap()];
    device.read(&mut buf, 0)?;
    Ok(buf)
}

/// A layer made on one host, published on a server, and used on another.
fn published(server: &Server, format: Format, sums: bool) -> (Host, LayerName, Value, Vec<u8>) {
    let (from, to) = (host(), host());
    let mut whole = content(5, 30);
    whole.resize(whole.len().next_multiple_of(4096), 0);
    let stack = from.imported(&whole);
    let layer = stack["layers"][0].as_str().unwrap();
    let mut file = from.file(layer);
    let name = LayerName::new(Id::random().unwrap(), format);
    if format == Format::Zfile {
        let mut out =
            ::layers::ZFileWriter::new(Vec::new(), ::layers::ZFileOptions::new(::layers::Algorithm::Lz4)).unwrap();
        io::Write::write_all(&mut out, &file).unwrap();
        file = out.finish().unwrap().0;
    }
    server.put("/layer", file.clone());
    let url = format!("{}/layer", server.address);
    let remote = described(Source::Http { url }, &file, sums);
    let mut call = serde_json::to_value(&remote).unwrap();
    call["layer"] = json!(name);
    to.call("add_remote_layer", call).unwrap();
    let stack = json!({ "layers": [name], "size_bytes": stack["size_bytes"] });
    (to, name, stack, whole)
}

#[test]
fn disk_and_memory_of_a_remote_layer_show_its_bytes() {
    for (format, sums) in [(Format::Lsmt, false), (Format::Lsmt, true), (Format::Zfile, false)] {
        let server = Server::start().unwrap();
        let (host, name, stack, whole) = published(&server, format, sums);
        let memory = host.call("attach_memory", json!({ "owner": "a", "stack": stack })).unwrap();
        assert_eq!(bytes(host.device(Kind::Memory, &memory).as_ref()).unwrap(), whole);
        let disk = host.call("create_disk", json!({ "owner": "a", "stack": stack })).unwrap();
        let disk = host.device(Kind::Disk, &disk);
        disk.write(&[7; 4096], 4096, false).unwrap();
        let mut expected = whole.clone();
        expected[4096..8192].fill(7);
        assert_eq!(bytes(disk.as_ref()).unwrap(), expected);
        let listed = host.call("layers", json!({})).unwrap();
        assert_eq!(listed["layers"][0]["layer"], json!(name));
        assert_eq!(host.call("delete_layers", json!({ "layers": [name] })).unwrap()["deleted"], json!([]));
        host.call("remove", json!({ "owner": "a" })).unwrap();
        assert_eq!(host.call("delete_layers", json!({ "layers": [name] })).unwrap()["deleted"], json!([name]));
        assert_eq!(host.call("layers", json!({})).unwrap()["layers"], json!([]));
    }
}

#[test]
fn wrong_bytes_of_a_compressed_layer_are_fetched_again_and_never_shown() {
    let server = Server::start().unwrap();
    let (host, _, stack, whole) = published(&server, Format::Zfile, false);
    let memory = host.call("attach_memory", json!({ "owner": "a", "stack": stack })).unwrap();
    let device = host.device(Kind::Memory, &memory);
    server.always(Some(Fault::WrongBytes));
    let wrong = bytes(device.as_ref());
    assert_eq!(wrong.err().map(|e| e.raw_os_error()), Some(Some(rustix::io::Errno::IO.raw_os_error())));
    server.always(None);
    assert_eq!(bytes(device.as_ref()).unwrap(), whole);
}

#[test]
fn attaching_says_which_of_the_three_it_is() {
    let faults = [
        (Fault::Status(404), Code::NotFound),
        (Fault::Status(403), Code::Unavailable),
        (Fault::WrongRange, Code::Corrupt),
    ];
    for (fault, code) in faults {
        let server = Server::start().unwrap();
        server.always(Some(fault.clone()));
        let (host, _, stack, whole) = published(&server, Format::Lsmt, true);
        let failed = host.call("attach_memory", json!({ "owner": "a", "stack": stack }));
        assert_eq!(failed.err().map(|e| e.code), Some(code), "{fault:?}");
        server.always(None);
        let memory = host.call("attach_memory", json!({ "owner": "a", "stack": stack })).unwrap();
        assert_eq!(bytes(host.device(Kind::Memory, &memory).as_ref()).unwrap(), whole);
    }
}

#[test]
fn a_layer_describes_itself_for_others() {
    let host = host();
    let mut whole = content(3, 31);
    whole.resize(whole.len().next_multiple_of(4096), 0);
    let stack = host.imported(&whole);
    let layer = &stack["layers"][0];
    let said = host.call("describe_layer", json!({ "layer": layer })).unwrap();
    let file = host.file(layer.as_str().unwrap());
    let expected = described(Source::Http { url: "http://x/y".into() }, &file, true);
    assert_eq!(said["digest"], json!(expected.digest));
    assert_eq!(said["block_sums"], json!(expected.block_sums));
    assert_eq!(said["size_bytes"], json!(expected.size_bytes));
}

fn replays_done(host: &Host) -> u64 {
    host.call("statistics", json!({})).unwrap()["working_sets"]["replays"]["done"].as_u64().unwrap()
}

#[test]
fn what_a_guest_touched_first_is_here_before_the_next_one_asks() {
    let server = Server::start().unwrap();
    let (host, name, stack, whole) = published(&server, Format::Lsmt, true);
    let attach = json!({ "owner": "a", "stack": stack });
    let memory = host.call("attach_memory", attach.clone()).unwrap();
    let device = host.device(Kind::Memory, &memory);
    let mut buf = [0; 4096];
    for at in [3 * BLOCK as u64, 100 * 4096] {
        device.read(&mut buf, at).unwrap();
    }
    drop(device);
    host.call("detach", json!({ "owner": "a" })).unwrap();
    let said = json!({ "kind": "memory", "stack": stack });
    let set = host.call("working_set", said.clone()).unwrap()["working_set"].take();
    assert_eq!(set["runs"], json!([[6, 1], [12, 1]]));

    // Another node, whose cache is empty.
    let cold = self::host();
    let path = host.directory.path().join("remote").join(name.as_str());
    let mut remote = serde_json::to_value(record::load::<Remote>(&path).unwrap()).unwrap();
    remote["layer"] = json!(name);
    cold.call("add_remote_layer", remote).unwrap();
    let mut given = said;
    given["working_set"] = set;
    cold.call("set_working_set", given).unwrap();
    let memory = cold.call("attach_memory", attach).unwrap();
    let device = cold.device(Kind::Memory, &memory);
    while replays_done(&cold) == 0
        || device.read_now(&mut buf, 3 * BLOCK as u64).unwrap() == crate::device::Answer::WouldWait
    {
        thread::yield_now();
    }
    assert_eq!(buf, whole[3 * BLOCK..3 * BLOCK + 4096]);
    // Once the layers are gone, so is what was known of them.
    cold.call("remove", json!({ "owner": "a" })).unwrap();
    drop(device);
    cold.call("delete_layers", json!({ "layers": [name] })).unwrap();
    let left = cold.call("working_set", json!({ "kind": "memory", "stack": stack })).unwrap();
    assert_eq!(left["working_set"], Value::Null);
}
