"""Files on disks and in object stores: paths, whole and appended files, uploads, untrusted files, open folders."""
