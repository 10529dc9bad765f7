from fedkeel.deploy.flower import client_app, server_app

__all__ = ["client_app", "server_app"]
