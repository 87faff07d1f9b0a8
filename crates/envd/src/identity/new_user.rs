//! Adding an account to an image, without any of its tools.

use std::fs;
use std::io;
use std::os::unix::fs::chown;
use std::path::Path;

use crate::etc;

const PASSWD: &str = "/etc/passwd";
const GROUP: &str = "/etc/group";
const SHADOW: &str = "/etc/shadow";
const GROUP_SHADOW: &str = "/etc/gshadow";
const SHELLS: [&str; 3] = ["/bin/bash", "/usr/bin/bash", "/bin/sh"];
const FIRST_ID: u32 = 1000;
const LAST_ID: u32 = 59_999;

/// Refuses names that would break the files, or the tools that read them.
pub(super) fn check_name(name: &str) -> Result<(), String> {
    let fine = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'_' | b'-' | b'.');
    let first = name.bytes().next().is_some_and(|b| b.is_ascii_lowercase() || b == b'_');
    if first && name.len() <= 32 && name.bytes().all(fine) {
        Ok(())
    } else {
        Err(format!("{name:?} cannot be a user name"))
    }
}

/// Creates the account *name* with a group, a home and a shell.
///
/// # Errors
/// Those of the file system.
pub(super) fn create(name: &str) -> io::Result<()> {
    let passwd = etc::read(Path::new(PASSWD))?;
    let group = etc::read(Path::new(GROUP))?.unwrap_or_default();
    let shell = SHELLS.into_iter().find(|shell| Path::new(shell).exists()).unwrap_or("/bin/sh");
    // An image without a list of accounts gets one in which root is still somebody.
    let passwd = passwd.unwrap_or_else(|| format!("root:x:0:0:root:/root:{shell}\n"));
    let lists = Lists::new(name, &passwd, &group, shell)?;
    // Groups first: an account that is there is complete.
    etc::replace(Path::new(GROUP), &lists.group, 0o644, true)?;
    append_if_present(GROUP_SHADOW, &format!("{name}:!::"))?;
    append_if_present(SHADOW, &format!("{name}:*:19000:0:99999:7:::"))?;
    make_home(&lists.home, lists.uid, lists.gid)?;
    etc::replace(Path::new(PASSWD), &lists.passwd, 0o644, true)
}

/// The lists of accounts and groups with the new one in them.
struct Lists {
    passwd: String,
    group: String,
    uid: u32,
    gid: u32,
    home: String,
}

impl Lists {
    fn new(name: &str, passwd: &str, group: &str, shell: &str) -> io::Result<Self> {
        let uid = free_id(&[passwd, group])?;
        let existing =
            group.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')?.split(':').nth(1)?.parse().ok());
        let gid = existing.unwrap_or(uid);
        let home = format!("/home/{name}");
        let group = if existing.is_some() { group.to_owned() } else { appended(group, &format!("{name}:x:{gid}:")) };
        let passwd = appended(passwd, &format!("{name}:x:{uid}:{gid}::{home}:{shell}"));
        Ok(Self { passwd, group, uid, gid, home })
    }
}

fn free_id(lists: &[&str]) -> io::Result<u32> {
    let taken: Vec<u32> =
        lists.iter().flat_map(|list| list.lines()).filter_map(|line| line.split(':').nth(2)?.parse().ok()).collect();
    let free = (FIRST_ID..=LAST_ID).find(|id| !taken.contains(id));
    free.ok_or_else(|| io::Error::other("there is no free user id"))
}

fn appended(text: &str, line: &str) -> String {
    let separator = if text.is_empty() || text.ends_with('\n') { "" } else { "\n" };
    format!("{text}{separator}{line}\n")
}

fn append_if_present(path: &str, line: &str) -> io::Result<()> {
    let path = Path::new(path);
    let name = line.split(':').next().unwrap_or("");
    match etc::read(path)? {
        None => Ok(()),
        Some(text) if text.lines().any(|l| l.split(':').next() == Some(name)) => Ok(()),
        Some(text) => etc::replace(path, &appended(&text, line), 0o640, true),
    }
}

fn make_home(home: &str, uid: u32, gid: u32) -> io::Result<()> {
    match fs::create_dir_all(home) {
        Ok(()) => chown(home, Some(uid), Some(gid)),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_could_break_a_list_are_refused() {
        for bad in ["", "a:b", "a\nb", "../x", "1a", "-a", "A", "ü", &"a".repeat(33)] {
            assert!(check_name(bad).is_err(), "{bad:?}");
        }
        for good in ["user", "_x", "a-b.c_1"] {
            assert!(check_name(good).is_ok(), "{good:?}");
        }
    }

    #[test]
    fn a_new_account_gets_a_free_number_and_its_own_group() {
        let lists =
            Lists::new("user", "root:x:0:0::/root:/bin/sh\nother:x:1000:1000::/:/bin/sh", "other:x:1001:\n", "/bin/sh")
                .unwrap();
        assert_eq!(lists.passwd.lines().last(), Some("user:x:1002:1002::/home/user:/bin/sh"));
        assert_eq!(lists.group, "other:x:1001:\nuser:x:1002:\n");
    }

    #[test]
    fn an_existing_group_of_that_name_is_used() {
        let lists = Lists::new("user", "", "user:x:50:\n", "/bin/sh").unwrap();
        assert_eq!((lists.uid, lists.gid, lists.group.as_str()), (1000, 50, "user:x:50:\n"));
    }
}
