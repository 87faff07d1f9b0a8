//! The name of the machine, and that it resolves.

use std::io;
use std::path::Path;

use rustix::system::{sethostname, uname};

use crate::etc;
use crate::say;

/// Marks the line that is ours in `/etc/hosts`.
const MARK: &str = "# set by agentenv";

/// Names the machine, in the kernel and in `/etc`.
///
/// # Errors
/// Those of the kernel. A file that cannot be written is only told of.
pub(crate) fn set_hostname(name: &str) -> io::Result<()> {
    if uname().nodename().to_bytes() != name.as_bytes() {
        sethostname(name.as_bytes())?;
    }
    // What the guest's owner has made of its own files must not cost him the sandbox.
    for written in [write_hostname(name), write_hosts(name)] {
        if let Err(error) = written {
            say!("the name of the machine: {error}");
        }
    }
    Ok(())
}

fn write_hostname(name: &str) -> io::Result<()> {
    etc::overwrite(Path::new("/etc/hostname"), &format!("{name}\n"), 0o644, true)
}

fn write_hosts(name: &str) -> io::Result<()> {
    let hosts = Path::new("/etc/hosts");
    let old = etc::read(hosts)?.unwrap_or_default();
    etc::overwrite(hosts, &with_name(&old, name), 0o644, true)
}

/// The image's own lines, with `localhost` and *name* resolvable.
fn with_name(old: &str, name: &str) -> String {
    let mut lines: Vec<String> = old.lines().filter(|line| !line.ends_with(MARK)).map(str::to_owned).collect();
    let resolves = |lines: &[String], wanted: &str, v6: bool| {
        lines.iter().any(|line| {
            let mut words = line.split('#').next().unwrap_or("").split_whitespace();
            words.next().is_some_and(|address| address.contains(':') == v6) && words.any(|word| word == wanted)
        })
    };
    if !resolves(&lines, "localhost", false) {
        lines.push(format!("127.0.0.1 localhost {MARK}"));
    }
    if !resolves(&lines, name, false) {
        lines.push(format!("127.0.1.1 {name} {MARK}"));
    }
    lines.join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lines_of_the_image_are_kept_and_ours_are_replaced() {
        let first = with_name("10.0.0.1 db\n127.0.0.1 localhost\n", "one");
        assert_eq!(first, format!("10.0.0.1 db\n127.0.0.1 localhost\n127.0.1.1 one {MARK}\n"));
        let second = with_name(&first, "two");
        assert_eq!(second, format!("10.0.0.1 db\n127.0.0.1 localhost\n127.0.1.1 two {MARK}\n"));
        assert_eq!(with_name(&second, "two"), second);
    }

    #[test]
    fn an_empty_file_gets_both_lines_and_comments_do_not_count() {
        let text = with_name("# 127.0.0.1 localhost\n::1 localhost\n", "x");
        assert_eq!(
            text,
            format!("# 127.0.0.1 localhost\n::1 localhost\n127.0.0.1 localhost {MARK}\n127.0.1.1 x {MARK}\n")
        );
    }
}
