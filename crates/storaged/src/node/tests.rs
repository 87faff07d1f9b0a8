use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;

use serde_json::{Value, json};

use super::*;
use crate::error::Left;
use crate::protocol::parse;

const SIZE: u64 = 1 << 20;

struct Bench {
    service: Service,
    session: Session,
    directory: tempfile::TempDir,
}

fn bench() -> Bench {
    let directory = tempfile::tempdir().unwrap();
    let service = Service::new(Arc::new(Node::open(directory.path()).unwrap()));
    Bench { service, session: Session::default(), directory }
}

impl Bench {
    /// The next daemon on the same directory.
    fn reopen(self) -> Self {
        let Self { service, session, directory } = self;
        drop((service, session));
        let service = Service::new(Arc::new(Node::open(directory.path()).unwrap()));
        Self { service, session: Session::default(), directory }
    }

    fn call(&self, call: &str, arguments: Value) -> Result<Value> {
        let mut frame = arguments;
        frame["id"] = json!(1);
        frame["call"] = json!(call);
        let request = parse(frame.to_string().as_bytes()).unwrap();
        self.service.call(&self.session, request.call?)
    }

    fn fine(&self, call: &str, arguments: Value) -> Value {
        self.call(call, arguments).unwrap()
    }

    fn fails(&self, call: &str, arguments: Value) -> Code {
        self.call(call, arguments).unwrap_err().code
    }

    fn device(&self, kind: Kind, name: &str) -> Arc<dyn Device> {
        let node = self.service.node();
        node.device(node.find(kind, name).unwrap()).unwrap()
    }

    fn file(&self, name: &str, content: &[u8]) -> PathBuf {
        let path = self.directory.path().join(name);
        fs::write(&path, content).unwrap();
        path
    }

    /// A stack of one layer with *content*.
    fn imported(&self, content: &[u8]) -> Value {
        let source = self.file("source", content);
        self.fine("import", json!({ "source": source, "size_bytes": SIZE }))["stack"].take()
    }
}

fn empty() -> Value {
    json!({ "layers": [], "size_bytes": SIZE })
}

fn whole(device: &dyn Device) -> Vec<u8> {
    let mut buf = vec![0xee; usize::try_from(device.size_bytes()).unwrap()];
    device.read(&mut buf, 0).unwrap();
    buf
}

fn name_of(path: &Value) -> String {
    Path::new(path["path"].as_str().unwrap()).file_name().unwrap().to_str().unwrap().to_owned()
}

fn padded(content: &[u8]) -> Vec<u8> {
    let mut whole = content.to_vec();
    whole.resize(usize::try_from(SIZE).unwrap(), 0);
    whole
}

#[test]
fn memory_of_one_stack_is_one_device_for_all_and_goes_with_the_last() {
    let bench = bench();
    let stack = bench.imported(&[7; 8192]);
    let first = bench.fine("attach_memory", json!({ "owner": "a", "stack": stack }));
    let second = bench.fine("attach_memory", json!({ "owner": "b", "stack": stack }));
    let zeros = bench.fine("attach_memory", json!({ "owner": "c", "stack": empty() }));
    assert_eq!(first, second);
    assert_ne!(first, zeros);
    assert_eq!(whole(&*bench.device(Kind::Memory, &name_of(&first))), padded(&[7; 8192]));
    assert_eq!(whole(&*bench.device(Kind::Memory, &name_of(&zeros))), padded(&[]));
    assert_eq!(bench.fails("attach_memory", json!({ "owner": "a", "stack": empty() })), Code::AlreadyExists);

    let bench = bench.reopen();
    let node = Arc::clone(bench.service.node());
    let id = node.find(Kind::Memory, &name_of(&first)).unwrap();
    bench.fine("detach", json!({ "owner": "a" }));
    bench.fine("detach", json!({ "owner": "a" }));
    assert!(node.device(id).is_some());
    bench.fine("detach", json!({ "owner": "b" }));
    assert!(node.device(id).is_none() && node.find(Kind::Memory, &name_of(&first)).is_none());
    assert_eq!(node.list(Kind::Memory, None, 10).len(), 1, "that of zeros");
    let again = bench.fine("attach_memory", json!({ "owner": "a", "stack": stack }));
    assert_eq!(again, first, "the kernel still has its pages");
    assert_eq!(whole(&*bench.device(Kind::Memory, &name_of(&first))), padded(&[7; 8192]));
    bench.fine("detach", json!({ "owner": "a" }));
    assert_eq!(bench.fine("delete_layers", json!({ "layers": stack["layers"] }))["deleted"], stack["layers"]);
    assert_eq!(bench.fails("attach_memory", json!({ "owner": "a", "stack": stack })), Code::NotFound);
}

#[test]
fn memory_that_nobody_has_attached_stays_for_a_while_and_not_for_ever() {
    let bench = bench();
    let stacks: Vec<Value> = (1..40_u64).map(|pages| json!({ "layers": [], "size_bytes": pages * 4096 })).collect();
    let attach = |stack: &Value| bench.fine("attach_memory", json!({ "owner": "a", "stack": stack }));
    let mut paths = Vec::new();
    for stack in &stacks {
        paths.push(attach(stack));
        bench.fine("detach", json!({ "owner": "a" }));
    }
    assert_eq!(attach(&stacks[38]), paths[38]);
    bench.fine("detach", json!({ "owner": "a" }));
    assert_ne!(attach(&stacks[0]), paths[0], "32 were used since");
    assert_eq!(bench.fine("statistics", json!({}))["memories"], json!(1));
}

#[test]
fn layers_of_parts_of_pages_are_no_memory() {
    let bench = bench();
    bench.fine("create_disk", json!({ "owner": "a", "stack": empty() }));
    bench.device(Kind::Disk, "a").write(&[1; 512], 512, false).unwrap();
    let stack = bench.fine("seal_disk", json!({ "owner": "a" }))["stack"].take();
    assert_eq!(bench.fails("attach_memory", json!({ "owner": "b", "stack": stack })), Code::Invalid);
    let odd = json!({ "layers": [], "size_bytes": 512 });
    assert_eq!(bench.fails("attach_memory", json!({ "owner": "b", "stack": odd })), Code::Invalid);
    assert!(bench.fine("owners", json!({}))["owners"].as_array().unwrap().len() == 1);
}

#[test]
fn a_raw_file_becomes_a_layer_without_its_zeros_and_is_gone() {
    let bench = bench();
    let mut content = vec![0; 300_001];
    content[4096..8192].fill(1);
    content[299_999] = 2;
    let stack = bench.imported(&content);
    assert!(!bench.directory.path().join("source").exists());
    bench.fine("create_disk", json!({ "owner": "a", "stack": stack }));
    assert_eq!(whole(&*bench.device(Kind::Disk, "a")), padded(&content));
    let listed = bench.fine("layers", json!({}));
    assert!(listed["layers"][0]["size_bytes"].as_u64().unwrap() < 40_000, "{listed}");

    for (path, code) in [
        (PathBuf::from("source"), Code::Invalid),
        (bench.directory.path().to_owned(), Code::Invalid),
        (bench.directory.path().join("nothing"), Code::NotFound),
        (bench.file("large", &vec![1; usize::try_from(SIZE).unwrap() + 1]), Code::Invalid),
    ] {
        assert_eq!(bench.fails("import", json!({ "source": path, "size_bytes": SIZE })), code, "{path:?}");
    }
    let link = bench.directory.path().join("link");
    std::os::unix::fs::symlink(bench.file("target", &[1]), &link).unwrap();
    assert_eq!(bench.fails("import", json!({ "source": link, "size_bytes": SIZE })), Code::Invalid);
    assert!(fs::read_dir(bench.directory.path().join("temporary")).unwrap().next().is_none());
}

#[test]
fn flattening_keeps_the_bytes_and_drops_what_is_hidden() {
    let bench = bench();
    let stack = bench.imported(&vec![7; 1 << 18]);
    bench.fine("create_disk", json!({ "owner": "a", "stack": stack }));
    let disk = bench.device(Kind::Disk, "a");
    for round in 0..20_u8 {
        disk.write(&[round + 1; 700], u64::from(round) * 5000 + 13, false).unwrap();
        disk.discard(u64::from(round) * 9000, 4096).unwrap();
        bench.fine("seal_disk", json!({ "owner": "a" }));
    }
    let expected = whole(&*disk);
    let sealed = bench.fine("seal_disk", json!({ "owner": "a" }))["stack"].take();
    assert_eq!(sealed["layers"].as_array().unwrap().len(), 21);
    for kind in ["disk", "memory"] {
        let flat = bench.fine("flatten", json!({ "kind": kind, "stack": sealed }))["stack"].take();
        assert_eq!(flat["layers"].as_array().unwrap().len(), 1);
        bench.fine("create_disk", json!({ "owner": kind, "stack": flat }));
        assert_eq!(whole(&*bench.device(Kind::Disk, kind)), expected);
        let same = bench.fine("flatten", json!({ "kind": kind, "stack": flat }))["stack"].take();
        assert_eq!(same, flat);
    }
}

#[test]
fn what_anybody_needs_cannot_be_deleted() {
    let bench = bench();
    let stack = bench.imported(&[1; 4096]);
    let layers = &stack["layers"];
    let other = Session::default();
    let delete = |session: &Session| {
        let frame = json!({ "id": 1, "call": "delete_layers", "layers": layers }).to_string();
        let answer = bench.service.call(session, parse(frame.as_bytes()).unwrap().call.unwrap()).unwrap();
        answer["deleted"].as_array().unwrap().len()
    };
    assert_eq!(delete(&other), 0, "the connection that made it has it");
    bench.fine("create_disk", json!({ "owner": "a", "stack": stack }));
    assert_eq!(delete(&bench.session), 0, "a disk has it");
    bench.fine("attach_memory", json!({ "owner": "b", "stack": stack }));
    bench.fine("remove", json!({ "owner": "a" }));
    assert_eq!(delete(&bench.session), 0, "memory has it");
    bench.fine("detach", json!({ "owner": "b" }));
    assert_eq!(delete(&bench.session), 1);
    assert_eq!(delete(&bench.session), 0);
    assert_eq!(bench.fails("create_disk", json!({ "owner": "a", "stack": stack })), Code::NotFound);
    assert!(bench.fine("owners", json!({}))["owners"].as_array().unwrap().is_empty());
}

#[test]
fn a_new_daemon_finds_what_the_last_one_had() {
    let bench = bench();
    let stack = bench.imported(&[1; 4096]);
    bench.fine("create_disk", json!({ "owner": "a", "stack": stack }));
    bench.fine("attach_memory", json!({ "owner": "a", "stack": stack }));
    bench.fine("create_disk", json!({ "owner": "b", "stack": empty() }));
    bench.device(Kind::Disk, "a").write(&[2; 600], 100, false).unwrap();
    bench.fine("resize_disk", json!({ "owner": "b", "size_bytes": 2 * SIZE }));
    let owners = bench.fine("owners", json!({}));
    let devices = |bench: &Bench| bench.service.node().list(Kind::Disk, None, 10);
    let (before, content) = (devices(&bench), whole(&*bench.device(Kind::Disk, "a")));
    // Made by an operation that was cut short.
    bench.file("uppers/0123456789abcdef0123456789abcdef.data", b"x");
    let bench = bench.reopen();
    assert_eq!(bench.fine("owners", json!({})), owners);
    assert_eq!(devices(&bench), before);
    assert_eq!(whole(&*bench.device(Kind::Disk, "a")), content);
    assert_eq!(bench.device(Kind::Disk, "b").size_bytes(), 2 * SIZE);
    assert_eq!(bench.fails("create_disk", json!({ "owner": "a", "stack": empty() })), Code::AlreadyExists);
    assert_eq!(fs::read_dir(bench.directory.path().join("uppers")).unwrap().count(), 4);
    let after = bench.fine("attach_memory", json!({ "owner": "b", "stack": empty() }));
    assert!(before.iter().all(|named| named.id.0.to_string() != name_of(&after)));
}

#[test]
fn a_damaged_record_costs_one_disk_and_it_can_be_removed() {
    let bench = bench();
    let stack = bench.imported(&[1; 4096]);
    bench.fine("create_disk", json!({ "owner": "a", "stack": stack }));
    bench.fine("create_disk", json!({ "owner": "b", "stack": empty() }));
    let path = bench.directory.path().join("images/disk-a");
    let record = File::options().write(true).open(path).unwrap();
    record.write_all_at(b"9", 12).unwrap();
    let bench = bench.reopen();
    let failed = bench.call("open_disk", json!({ "owner": "a" })).unwrap_err();
    assert_eq!((failed.code, failed.left), (Code::Corrupt, Left::Lost));
    bench.fine("open_disk", json!({ "owner": "b" }));
    assert_eq!(bench.fine("owners", json!({}))["owners"][0]["damaged"], json!(true));
    assert_eq!(fs::read_dir(bench.directory.path().join("uppers")).unwrap().count(), 4, "nothing is thrown away");
    let delete = json!({ "layers": stack["layers"] });
    assert_eq!(bench.fine("layers", json!({}))["layers"][0]["held"], json!(true), "it may be what the disk needs");
    assert_eq!(bench.fine("delete_layers", delete.clone())["deleted"], json!([]));
    bench.fine("remove", json!({ "owner": "a" }));
    assert_eq!(bench.fine("delete_layers", delete)["deleted"], stack["layers"]);
    let bench = bench.reopen();
    assert_eq!(bench.fails("open_disk", json!({ "owner": "a" })), Code::NotFound);
    assert_eq!(fs::read_dir(bench.directory.path().join("uppers")).unwrap().count(), 2);
}

#[test]
fn a_drained_daemon_attaches_nothing_and_does_the_rest() {
    let bench = bench();
    bench.fine("create_disk", json!({ "owner": "a", "stack": empty() }));
    bench.fine("drain", json!({}));
    assert_eq!(bench.fails("open_disk", json!({ "owner": "a" })), Code::Unavailable);
    bench.fine("seal_disk", json!({ "owner": "a" }));
    bench.fine("shutdown", json!({}));
    assert_eq!(bench.fails("seal_disk", json!({ "owner": "a" })), Code::Unavailable);
}

#[test]
fn owners_at_work_at_once_do_not_disturb_each_other() {
    let bench = bench();
    let stack = bench.imported(&[1; 4096]);
    std::thread::scope(|scope| {
        for owner in 0..8 {
            let (bench, stack) = (&bench, &stack);
            scope.spawn(move || {
                let owner = format!("box-{owner}");
                for _ in 0..5 {
                    bench.fine("create_disk", json!({ "owner": owner, "stack": stack }));
                    let path = bench.fine("attach_memory", json!({ "owner": owner, "stack": stack }));
                    assert_eq!(whole(&*bench.device(Kind::Memory, &name_of(&path)))[0], 1);
                    bench.device(Kind::Disk, &owner).write(&[3; 512], 0, false).unwrap();
                    bench.fine("seal_disk", json!({ "owner": owner }));
                    bench.fine("remove", json!({ "owner": owner }));
                }
            });
        }
    });
    let node = bench.service.node();
    assert!(node.list(Kind::Memory, None, 10).is_empty() && node.list(Kind::Disk, None, 10).is_empty());
    assert!(fs::read_dir(bench.directory.path().join("images")).unwrap().next().is_none());
}

#[test]
fn a_full_stack_of_layers_that_are_none_is_corrupt() {
    let bench = bench();
    let name = format!("{}.lsmt", "ab".repeat(16));
    let mut file = File::create(bench.directory.path().join("layers").join(&name)).unwrap();
    for content in [Vec::new(), vec![0; 4096], vec![0xff; 20_000]] {
        file.write_all(&content).unwrap();
        let stack = json!({ "layers": [name], "size_bytes": SIZE });
        assert_eq!(bench.fails("create_disk", json!({ "owner": "a", "stack": stack })), Code::Corrupt);
    }
    assert!(fs::read_dir(bench.directory.path().join("uppers")).unwrap().next().is_none());
}

/// A stack of *depth* layers, each of which changes two pages of a base, and the bytes it shows.
fn deep(bench: &Bench, depth: usize) -> (Value, Vec<u8>) {
    let stack = bench.imported(&vec![200; 1 << 18]);
    bench.fine("create_disk", json!({ "owner": "deep", "stack": stack }));
    let disk = bench.device(Kind::Disk, "deep");
    let mut sealed = stack;
    for round in 1..depth as u64 {
        disk.write(&[u8::try_from(round).unwrap(); 4096], round % 7 * 8192, false).unwrap();
        disk.discard(round % 5 * 20_480, 4096).unwrap();
        sealed = bench.fine("seal_disk", json!({ "owner": "deep" }))["stack"].take();
    }
    let content = whole(&*disk);
    bench.fine("remove", json!({ "owner": "deep" }));
    (sealed, content)
}

/// From how many files *stack* is read; it shows *content*.
fn read_from(bench: &Bench, stack: &Value, content: &[u8]) -> usize {
    let stack: Stack = serde_json::from_value(stack.clone()).unwrap();
    let view = bench.service.node().parts.stacks.open(&stack).unwrap();
    let mut buf = vec![0xee; usize::try_from(SIZE).unwrap()];
    view.read(&mut buf, 0).unwrap();
    assert!(buf == content);
    view.depth()
}

fn merged_files(bench: &Bench) -> usize {
    fs::read_dir(bench.directory.path().join("merged")).unwrap().count()
}

#[test]
fn a_deep_stack_of_memory_is_read_through_fewer_layers_and_shows_the_same() {
    let bench = bench();
    let (stack, content) = deep(&bench, 17);
    assert_eq!(read_from(&bench, &stack, &content), 17);
    let path = bench.fine("attach_memory", json!({ "owner": "a", "stack": stack }));
    bench.service.node().merger.wait_idle();
    assert!(whole(&*bench.device(Kind::Memory, &name_of(&path))) == content);
    bench.fine("detach", json!({ "owner": "a" }));
    let again = bench.fine("attach_memory", json!({ "owner": "b", "stack": stack }));
    assert_eq!(again, path);
    assert!(whole(&*bench.device(Kind::Memory, &name_of(&path))) == content);
    assert!(read_from(&bench, &stack, &content) <= 2, "the base, and the rest");
    assert_eq!(bench.fine("statistics", json!({}))["merged"]["layers"], json!(1));
    let layers = bench.fine("layers", json!({}));
    assert_eq!(layers["layers"].as_array().unwrap().len(), 17, "nobody is told of a copy");

    let bench = bench.reopen();
    assert!(read_from(&bench, &stack, &content) <= 2);
    // One that is damaged is not used, and the layers are as good as ever.
    let copy = |ending: &str| {
        let entries = fs::read_dir(bench.directory.path().join("merged")).unwrap();
        entries.map(|entry| entry.unwrap().path()).find(|path| path.extension().unwrap() == ending).unwrap()
    };
    let file = File::options().write(true).open(copy("lsmt")).unwrap();
    file.set_len(file.metadata().unwrap().len() - 4096).unwrap();
    let bench = bench.reopen();
    assert_eq!(read_from(&bench, &stack, &content), 17);
    assert_eq!(merged_files(&bench), 0);

    bench.fine("attach_memory", json!({ "owner": "c", "stack": stack }));
    bench.service.node().merger.wait_idle();
    assert_eq!(merged_files(&bench), 2);
    let delete = json!({ "layers": stack["layers"] });
    assert_eq!(bench.fine("delete_layers", delete.clone())["deleted"], json!([]));
    for owner in ["b", "c"] {
        bench.fine("remove", json!({ "owner": owner }));
    }
    assert_eq!(bench.fine("delete_layers", delete)["deleted"].as_array().unwrap().len(), 17);
    assert_eq!(merged_files(&bench), 0, "a copy goes with what it is a copy of");
}

#[test]
fn a_copy_that_was_cut_short_or_whose_layers_are_gone_is_removed_at_start() {
    let bench = bench();
    let (stack, content) = deep(&bench, 20);
    bench.fine("attach_memory", json!({ "owner": "a", "stack": stack }));
    bench.service.node().merger.wait_idle();
    assert_eq!(merged_files(&bench), 2);
    bench.file(&format!("merged/{}.lsmt", "ab".repeat(16)), b"no record");
    bench.file(&format!("merged/{}.sources", "cd".repeat(16)), b"no record");
    bench.file("temporary/half", b"a copy");
    let bench = bench.reopen();
    assert_eq!(merged_files(&bench), 2);
    assert!(read_from(&bench, &stack, &content) <= 2);
    bench.fine("remove", json!({ "owner": "a" }));
    fs::remove_file(bench.directory.path().join("layers").join(stack["layers"][19].as_str().unwrap())).unwrap();
    let bench = bench.reopen();
    assert_eq!(merged_files(&bench), 0);
}

#[test]
fn a_longer_copy_takes_the_place_of_a_shorter_one_that_nobody_reads() {
    let bench = bench();
    let (stack, content) = deep(&bench, 40);
    let part = |layers: usize| {
        let layers = &stack["layers"].as_array().unwrap()[..layers];
        json!({ "layers": layers, "size_bytes": SIZE })
    };
    for depth in [17, 39] {
        bench.fine("attach_memory", json!({ "owner": "a", "stack": part(depth) }));
        bench.service.node().merger.wait_idle();
        bench.fine("detach", json!({ "owner": "a" }));
    }
    assert!(read_from(&bench, &stack, &content) <= 3);
    assert_eq!(bench.fine("statistics", json!({}))["merging"], json!(0));
    let bench = bench.reopen();
    assert_eq!(merged_files(&bench), 2, "the shorter one is within the longer one");
    assert!(read_from(&bench, &stack, &content) <= 3);
}

#[test]
fn a_daemon_that_ends_waits_for_no_merge() {
    let bench = bench();
    let (stack, content) = deep(&bench, 30);
    bench.fine("attach_memory", json!({ "owner": "a", "stack": stack }));
    let bench = bench.reopen();
    read_from(&bench, &stack, &content);
    assert!(fs::read_dir(bench.directory.path().join("temporary")).unwrap().next().is_none());
}
