//! Users and groups of the image, read from its files: there is no C library to ask.

use std::io;
use std::path::Path;

use sys::credentials::Credentials;

use crate::etc;

const PASSWD: &str = "/etc/passwd";
const GROUP: &str = "/etc/group";

/// An account a process can run as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct User {
    pub name: String,
    pub home: String,
    pub credentials: Credentials,
}

/// The account called *name*. Root exists even in an image without a list of accounts.
///
/// # Errors
/// When the lists cannot be read.
pub(crate) fn lookup(name: &str) -> io::Result<Option<User>> {
    let passwd = etc::read(Path::new(PASSWD))?.unwrap_or_default();
    let group = etc::read(Path::new(GROUP))?.unwrap_or_default();
    Ok(find(name, &passwd, &group))
}

fn find(name: &str, passwd: &str, group: &str) -> Option<User> {
    for fields in records(passwd) {
        if let [found, _, uid, gid, _, home, ..] = fields[..]
            && found == name
            && let (Ok(uid), Ok(gid)) = (uid.parse(), gid.parse())
        {
            let groups = groups_of(name, gid, group);
            let home = if home.starts_with('/') { home } else { "/" };
            return Some(User {
                name: name.to_owned(),
                home: home.to_owned(),
                credentials: Credentials { uid, gid, groups },
            });
        }
    }
    let root = Credentials { uid: 0, gid: 0, groups: groups_of("root", 0, group) };
    (name == "root").then(|| User { name: "root".to_owned(), home: "/root".to_owned(), credentials: root })
}

fn groups_of(name: &str, primary: u32, group: &str) -> Vec<u32> {
    let mut groups = vec![primary];
    for fields in records(group) {
        if let [_, _, gid, members, ..] = fields[..]
            && members.split(',').any(|member| member.trim() == name)
            && let Ok(gid) = gid.parse()
            && !groups.contains(&gid)
        {
            groups.push(gid);
        }
    }
    groups
}

fn records(text: &str) -> impl Iterator<Item = Vec<&str>> {
    text.lines().filter(|line| !line.starts_with('#')).map(|line| line.split(':').collect())
}

/// Names for the numbers in file metadata, read once for many entries.
pub(crate) struct Names {
    passwd: String,
    group: String,
}

impl Names {
    /// Lists that cannot be read leave numbers as they are.
    pub(crate) fn load() -> Self {
        let text = |path: &str| etc::read(Path::new(path)).ok().flatten().unwrap_or_default();
        Self { passwd: text(PASSWD), group: text(GROUP) }
    }

    pub(crate) fn user(&self, uid: u32) -> String {
        name_of(&self.passwd, uid)
    }

    pub(crate) fn group(&self, gid: u32) -> String {
        name_of(&self.group, gid)
    }
}

fn name_of(list: &str, id: u32) -> String {
    let number = id.to_string();
    let found = list.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)? == number && !name.starts_with('#')).then(|| name.to_owned())
    });
    found.unwrap_or(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    const USERS: &str = "root:x:0:0:root:/root:/bin/sh\n# comment:x:5:5::/:\nuser:x:1000:1000::/home/user:/bin/bash\nbad:x:no:1::/:\nshort:x\n";
    const GROUPS: &str = "root:x:0:\nsudo:x:27:other,user\nuser:x:1000:\nuser2:x:1001:user2\n";

    #[test]
    fn an_account_comes_with_its_groups() {
        let user = find("user", USERS, GROUPS).unwrap();
        assert_eq!(user.credentials, Credentials { uid: 1000, gid: 1000, groups: vec![1000, 27] });
        assert_eq!(user.home, "/home/user");
    }

    #[test]
    fn malformed_lines_and_unknown_names_are_nobody() {
        for name in ["bad", "short", "nobody", "", "# comment", "1000"] {
            assert_eq!(find(name, USERS, GROUPS), None, "{name}");
        }
    }

    #[test]
    fn root_needs_no_list() {
        assert_eq!(find("root", "", "").unwrap().credentials.uid, 0);
    }

    #[test]
    fn numbers_without_a_name_stay_numbers() {
        let names = Names { passwd: USERS.into(), group: GROUPS.into() };
        assert_eq!(names.user(1000), "user");
        assert_eq!(names.group(27), "sudo");
        assert_eq!(names.user(4242), "4242");
    }
}
